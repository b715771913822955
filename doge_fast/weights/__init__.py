"""The domain weights: everything that is K x K, and nothing of the size of the model.

`objective` holds the domains and the targets, `scores` turns a Gram matrix into scores, `reweight`
is the step as one operator, `state` holds the weights of a run, `checkpoint` saves them, and
`subset` draws a few of many domains. `simplex` and `projection` compute with points on the simplex,
`group_dro` has DoReMi's weights. Imports the kernels and nothing above them.
"""
