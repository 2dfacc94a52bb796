"""Compatible inference: text in and out over the model's own tokenizer and chat template, in the shapes of OpenAI.

``text.py`` and ``detokenizing.py`` turn text into tokens and back; ``templates.py``, ``tools.py`` and ``parsing.py``
know chat; ``generating.py`` runs samples; ``chat.py`` and ``completions.py`` put answers together. The paths are in
``routes/openai.py``.
"""
