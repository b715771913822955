"""DoGE domain reweighting: an optimizer wrapper that learns domain weights."""
