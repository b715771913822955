"""An existing Hugging Face Trainer script, with DoGE: another class and `domains=`.

    python examples/hf_trainer.py                          # learns weights for a held-out target
    python examples/hf_trainer.py --target universal       # ... for all training domains
    python examples/hf_trainer.py --resume                 # goes on from the last checkpoint
    torchrun --nproc-per-node 2 examples/hf_trainer.py     # the same weights, dropout aside

What to copy into your script: the two lines marked DoGE. The data set stays one data set; a column
"domain" says where each example is from (`domain_column=` takes another name). A `target` outside
`domains` is measured in every step and never trained on.

The data stands in for yours and has a known answer: sentences of a made-up language in which each
word has a usual successor. "kin" follows the grammar of the target, "stranger" another one, "half"
each for half of the words. To do well on the target one should read kin, then half.
"""

import argparse
import json
import os
from pathlib import Path

import datasets
import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments, set_seed

from doge_fast.integrations.transformers import DoGETrainer

DOMAINS = ["stranger", "half", "kin"]
VOCAB, LENGTH = 32, 16
LIKE_TARGET = {"stranger": 0.0, "half": 0.5, "kin": 1.0, "target": 1.0}


def mixed_dataset(count: int, seed: int) -> datasets.Dataset:
    """One data set of all domains, as scripts have it."""
    generator = np.random.default_rng(seed)
    grammar = np.random.default_rng(0)
    ours, theirs = grammar.permutation(VOCAB), grammar.permutation(VOCAB)
    rows = []
    for domain, like_target in LIKE_TARGET.items():
        words = [generator.integers(VOCAB, size=count)]
        for _ in range(LENGTH - 1):
            is_ours = generator.random(count) < like_target
            usual = np.where(is_ours, ours[words[-1]], theirs[words[-1]])
            other = generator.integers(VOCAB, size=count)
            words.append(np.where(generator.random(count) < 0.9, usual, other))
        for ids in np.stack(words, axis=1).tolist():
            rows.append({"input_ids": ids, "labels": ids, "domain": domain})
    return datasets.Dataset.from_list(rows).shuffle(seed=seed)


def model_from_config() -> GPT2LMHeadModel:
    config = GPT2Config(
        vocab_size=VOCAB,
        n_positions=LENGTH,
        n_layer=1,
        n_head=2,
        n_embd=32,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def main() -> None:
    parser = argparse.ArgumentParser(description="DoGE in a Trainer script")
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--save-steps", type=int, default=80)
    parser.add_argument("--target", default="target", choices=["target", "universal"])
    parser.add_argument("--resume", action="store_true", help="from the last checkpoint")
    parser.add_argument("--out", type=Path, default=Path("hf_trainer"), help="where results go")
    options = parser.parse_args()

    set_seed(0)
    dataset = mixed_dataset(count=200, seed=1)
    held_out = mixed_dataset(count=20, seed=2)
    if options.target == "universal":
        dataset = dataset.filter(lambda row: row["domain"] != "target")
    trainer = DoGETrainer(  # DoGE: the class
        model=model_from_config(),
        args=TrainingArguments(
            output_dir=str(options.out),
            max_steps=options.steps,
            # Of every domain; over ranks a step has the sum of theirs.
            per_device_train_batch_size=8 // int(os.environ.get("WORLD_SIZE", "1")),
            learning_rate=1e-2,
            lr_scheduler_type="cosine",
            warmup_steps=5,
            save_steps=options.save_steps,
            logging_steps=max(1, options.steps // 4),
            eval_strategy="steps",
            eval_steps=options.steps,
            use_cpu=not torch.cuda.is_available(),
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=torch.cuda.is_available(),
        ),
        train_dataset=dataset,
        eval_dataset=held_out.filter(lambda row: row["domain"] == "target"),
        domains=DOMAINS,  # DoGE: the domains; without the next line, weights for all of them
        target=options.target,
    )
    trainer.train(resume_from_checkpoint=options.resume or None)

    trainer.save_model(str(options.out / "model"))
    if trainer.is_world_process_zero():
        trainer.doge.save_weights(options.out / "weights.json")
        losses = [line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line]
        print(json.dumps({"weights": trainer.weights, "target_loss": losses[-1]}, indent=1))


if __name__ == "__main__":
    main()
