"""A whole cluster on this machine, in the background: what `baton up` starts and `baton down` ends."""
