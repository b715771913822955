"""The domain weights: everything that is K x K, and nothing of the size of the model.

`objective` says whose loss counts, `scores` what a Gram matrix says of each domain, `reweight` is
the step as one operator, `state` keeps the weights of a run and `checkpoint` what is saved of them.
`subset` draws a few of many domains. Beside them stand `simplex` and `projection`, points on the
simplex, and `group_dro`, DoReMi's weights. Imports the kernels and nothing above.
"""
