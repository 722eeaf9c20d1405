"""Every example, run as its README says, in short form. ``make examples`` runs these, ``make test`` does not."""
