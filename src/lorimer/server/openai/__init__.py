"""Compatible inference: text in and out over the model's own tokenizer and chat template, in the shapes of OpenAI.

``text.py`` and ``detokenizing.py`` turn text into tokens and back; ``generating.py`` runs samples; ``chat.py`` and
``completions.py`` put answers together. Templates, tool calls and their parsing are in ``lorimer.chat``, the paths in
``routes/openai.py``.
"""
