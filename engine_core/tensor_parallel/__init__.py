"""One engine over several devices: every rank runs each step's plan. Knows runners and plans; leaves what a step
computes to `models`, what ranks do together to `wavecore.parallel`, and processes to `wavecore.transport`."""
