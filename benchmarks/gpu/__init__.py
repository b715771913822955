"""What a GPU must show: right, repeatable, how fast; `python -m benchmarks.gpu`."""
