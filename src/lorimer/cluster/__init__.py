"""Ray placement of engine workers, FSDP2 groups and vLLM samplers; needs the extra ``cluster``. Runs in Ray actors."""
