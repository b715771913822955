"""The paper's numbers, as printed, by the labels of its tables: what ours stand beside."""

import re
from collections.abc import Mapping

# {label of the table: {column: {row: value}}}; rows under names that `canonical` gives.
TABLES: Mapping[str, Mapping[str, Mapping[str, float]]] = {
    "tab:universal_ppl": {
        "uniform": dict(
            arxiv=8.105, book=44.990, c4=49.066, commoncrawl=45.903, github=3.944,
            stackexchange=8.628, wikipedia=12.047, average=16.526, worst=49.066,
        ),
        "DoGE": dict(
            arxiv=8.207, book=44.574, c4=42.558, commoncrawl=40.432, github=4.107,
            stackexchange=8.332, wikipedia=11.443, average=15.806, worst=44.574,
        ),
        "DoReMi-10k": dict(
            arxiv=8.698, book=50.594, c4=56.116, commoncrawl=46.459, github=3.739,
            stackexchange=9.022, wikipedia=11.380, average=17.172, worst=56.116,
        ),
        "DoReMi-50k": dict(
            arxiv=9.378, book=42.557, c4=41.388, commoncrawl=41.067, github=4.301,
            stackexchange=9.235, wikipedia=10.519, average=16.124, worst=42.557,
        ),
    },
    "tab:124M_ppl": {
        "uniform": dict(
            arxiv=8.672, book=51.535, c4=56.424, commoncrawl=52.661, github=4.266,
            stackexchange=9.555, wikipedia=14.043, average=18.566,
        ),
        "DoGE": dict(
            arxiv=8.954, book=51.564, c4=49.937, commoncrawl=47.297, github=4.533,
            stackexchange=9.365, wikipedia=13.567, average=18.066,
        ),
        "DoReMi-10k": dict(
            arxiv=9.353, book=57.685, c4=63.968, commoncrawl=53.347, github=4.008,
            stackexchange=9.898, wikipedia=13.208, average=19.208,
        ),
        "DoReMi-50k": dict(
            arxiv=10.149, book=49.038, c4=48.494, commoncrawl=47.898, github=4.770,
            stackexchange=10.392, wikipedia=12.246, average=18.355,
        ),
    },
    # The right half of tab:124M_ppl.
    "tab:210M_ppl": {
        "uniform": dict(
            arxiv=8.247, book=47.060, c4=51.862, commoncrawl=48.319, github=4.032,
            stackexchange=8.948, wikipedia=12.784, average=17.218,
        ),
        "DoGE": dict(
            arxiv=8.456, book=46.940, c4=45.588, commoncrawl=43.193, github=4.234,
            stackexchange=8.723, wikipedia=12.348, average=16.661,
        ),
        "DoReMi-10k": dict(
            arxiv=9.041, book=54.393, c4=60.781, commoncrawl=50.456, github=3.871,
            stackexchange=9.477, wikipedia=12.351, average=18.285,
        ),
        "DoReMi-50k": dict(
            arxiv=9.637, book=45.192, c4=44.799, commoncrawl=44.176, github=4.510,
            stackexchange=9.760, wikipedia=11.358, average=17.119,
        ),
    },
    "tab:ppl-ood": {
        "uniform": dict(
            arxiv=18.92, book=82.57, c4=89.56, commoncrawl=81.65, github=6.675,
            stackexchange=16.941, wikipedia=58.04,
        ),
        "DoGE": dict(
            arxiv=16.70, book=63.89, c4=63.96, commoncrawl=57.77, github=5.091,
            stackexchange=14.77, wikipedia=53.87,
        ),
        "uniform, fine-tuned": dict(
            arxiv=10.47, book=65.73, c4=71.24, commoncrawl=65.75, github=4.99,
            stackexchange=11.24, wikipedia=18.38,
        ),
        "DoGE, fine-tuned": dict(
            arxiv=10.20, book=56.94, c4=56.91, commoncrawl=51.173, github=4.26,
            stackexchange=10.98, wikipedia=17.71,
        ),
        "oracle": dict(
            arxiv=9.78, book=66.43, c4=70.69, commoncrawl=67.06, github=4.97,
            stackexchange=11.26, wikipedia=17.61,
        ),
    },
    # In per cent.
    "tab:fewshot": {
        "uniform": dict(
            copa=58.00, sciq=61.80, logiqa=23.20, piqa=59.85, wic=49.69, winogrande=50.99,
            average=50.59,
        ),
        "DoGE": dict(
            copa=62.00, sciq=65.00, logiqa=25.50, piqa=60.34, wic=49.69, winogrande=51.22,
            average=52.29,
        ),
        "DoReMi-10k": dict(
            copa=59.00, sciq=60.30, logiqa=24.58, piqa=56.86, wic=48.59, winogrande=49.41,
            average=49.79,
        ),
        "DoReMi-50k": dict(
            copa=61.00, sciq=64.50, logiqa=23.81, piqa=60.94, wic=49.53, winogrande=49.17,
            average=51.49,
        ),
    },
    "tab:dw": {
        "DoGE": dict(
            arxiv=0.088, book=0.045, c4=0.269, commoncrawl=0.214, github=0.070,
            stackexchange=0.166, wikipedia=0.148,
        ),
    },
    # Its columns are targets; that for arxiv sums to 0.910 as printed.
    "tab:ood-dw": {
        "for arxiv": dict(
            book=0.010, c4=0.125, commoncrawl=0.142, github=0.161, stackexchange=0.366,
            wikipedia=0.106,
        ),
        "for book": dict(
            arxiv=0.063, c4=0.341, commoncrawl=0.345, github=0.055, stackexchange=0.081,
            wikipedia=0.113,
        ),
        "for c4": dict(
            arxiv=0.035, book=0.117, commoncrawl=0.721, github=0.029, stackexchange=0.063,
            wikipedia=0.035,
        ),
        "for commoncrawl": dict(
            arxiv=0.045, book=0.124, c4=0.674, github=0.035, stackexchange=0.059,
            wikipedia=0.063,
        ),
        "for github": dict(
            arxiv=0.084, book=0.051, c4=0.058, commoncrawl=0.059, stackexchange=0.691,
            wikipedia=0.057,
        ),
        "for stackexchange": dict(
            arxiv=0.095, book=0.048, c4=0.099, commoncrawl=0.076, github=0.637,
            wikipedia=0.045,
        ),
        "for wikipedia": dict(
            arxiv=0.091, book=0.149, c4=0.201, commoncrawl=0.251, github=0.103,
            stackexchange=0.204,
        ),
    },
    "tab:ood-wiki-dw": {
        "for ca": dict(en=0.073, de=0.043, fr=0.344, es=0.516, ru=0.024),
        "for nl": dict(en=0.259, de=0.267, fr=0.176, es=0.203, ru=0.095),
    },
    "tab:robust": {
        "60M": dict(
            arxiv=0.0997, book=0.0467, c4=0.2455, commoncrawl=0.2004, github=0.0767,
            stackexchange=0.1968, wikipedia=0.1342,
        ),
        "82M": dict(
            arxiv=0.0880, book=0.0450, c4=0.2693, commoncrawl=0.2135, github=0.0703,
            stackexchange=0.1658, wikipedia=0.1482,
        ),
        "124M": dict(
            arxiv=0.0890, book=0.0456, c4=0.2789, commoncrawl=0.1968, github=0.0714,
            stackexchange=0.1703, wikipedia=0.1480,
        ),
    },
    "tab:cc-dw": {
        "full": dict(
            arxiv=0.08800, book=0.04500, c4=0.2693, commoncrawl=0.2135, github=0.07027,
            stackexchange=0.1658, wikipedia=0.1482,
        ),
        "low10": dict(
            arxiv=0.2071, book=0.04734, c4=0.1139, commoncrawl=0.09111, github=0.1123,
            stackexchange=0.2061, wikipedia=0.2221,
        ),
        "low30": dict(
            arxiv=0.1571, book=0.04601, c4=0.1425, commoncrawl=0.1142, github=0.1005,
            stackexchange=0.1994, wikipedia=0.2402,
        ),
        "low50": dict(
            arxiv=0.1094, book=0.04708, c4=0.2209, commoncrawl=0.1658, github=0.07782,
            stackexchange=0.1726, wikipedia=0.2063,
        ),
        "high30": dict(
            arxiv=0.07855, book=0.05304, c4=0.2871, commoncrawl=0.2537, github=0.06943,
            stackexchange=0.1494, wikipedia=0.1088,
        ),
        "high10": dict(
            arxiv=0.05635, book=0.05783, c4=0.3406, commoncrawl=0.3316, github=0.04462,
            stackexchange=0.1050, wikipedia=0.06402,
        ),
    },
    "tab:cc-ppl": {
        "uniform": dict(
            arxiv=8.672, book=51.535, c4=56.424, commoncrawl=52.661, github=4.266,
            stackexchange=9.555, wikipedia=14.043, average=18.566,
        ),
        "full": dict(
            arxiv=8.954, book=51.564, c4=49.937, commoncrawl=47.297, github=4.533,
            stackexchange=9.365, wikipedia=13.567, average=18.066,
        ),
        "low10": dict(
            arxiv=8.106, book=59.359, c4=61.225, commoncrawl=57.891, github=4.268,
            stackexchange=9.075, wikipedia=12.793, average=18.848,
        ),
        "low30": dict(
            arxiv=8.447, book=56.146, c4=57.866, commoncrawl=54.500, github=4.298,
            stackexchange=9.102, wikipedia=12.399, average=18.442,
        ),
        "low50": dict(
            arxiv=8.735, book=52.700, c4=53.652, commoncrawl=49.487, github=4.460,
            stackexchange=9.336, wikipedia=12.755, average=18.151,
        ),
        "high30": dict(
            arxiv=9.092, book=50.030, c4=48.422, commoncrawl=45.696, github=4.543,
            stackexchange=9.494, wikipedia=14.471, average=18.067,
        ),
        "high10": dict(
            arxiv=9.413, book=48.526, c4=45.789, commoncrawl=42.990, github=4.796,
            stackexchange=9.982, wikipedia=16.334, average=18.359,
        ),
    },
}  # fmt: skip


def canonical(name: str) -> str:
    """RedPajamaCommonCrawl, cc and common_crawl are one domain."""
    plain = re.sub(r"[^a-z0-9]", "", name.lower()).removeprefix("redpajama")
    return {"cc": "commoncrawl", "books": "book", "wiki": "wikipedia"}.get(plain, plain)


def columns_beside(table: str | None, rows: Mapping[str, str]) -> dict[str, dict[str, float]]:
    """The paper's columns of a table, by our names of its rows; none where a row is not in it.

    Args:
        table: the label; None: the paper prints no such table.
        rows: {our name: the paper's}.
    """
    if table is None:
        return {}
    return {
        column: {own: values[paper] for own, paper in rows.items() if paper in values}
        for column, values in TABLES[table].items()
        if any(paper in values for paper in rows.values())
    }
