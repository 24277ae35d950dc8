"""`baton traces` shows traces on a page; `baton trace` checks one."""
