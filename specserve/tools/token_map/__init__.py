"""Which tokens a draft should guess, counted on your own text or traffic: ``python -m specserve.token_map``."""
