"""The domain weights: everything that is K x K, and nothing of the size of the model.

A run has an `objective`: its domains and targets. `scores` turns a Gram matrix into scores, `rule`
holds the settings by which scores move the weights, and `reweight` is the step as one operator.
What a step changes lives in `state`; what can be wrong with the result is said by `diagnosis`, on
plain numbers, for the optimizer and the report alike. `checkpoint` saves the state, and `subset`
draws a few of many domains. `projection` has the nearest point of the simplex within bounds,
`group_dro` has DoReMi's weights. Imports the kernels and nothing above them.
"""
