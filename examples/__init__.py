"""Programs that use busync the way anybody would: through its public names alone."""
