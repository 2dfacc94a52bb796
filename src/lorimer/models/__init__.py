"""Base models outside the engine: where they come from, what they contain, and exports of their fine-tuned weights.

``sources`` finds a model and ``catalogue`` lists those on this machine; neither loads torch. The engine process calls
``sources.resolve`` when it starts; the commands ``lorimer model`` and ``lorimer export`` use the rest.
"""
