"""What a frontend may see of the engine: settings, sampling parameters, request options, custom kernels, model headers.

Knows values and their bounds, and never imports torch; leaves what they do to the rooms above.
"""
