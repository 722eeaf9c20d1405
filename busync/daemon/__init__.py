"""The two commands, ``busync-pub`` and ``busync-sub``.

    pub, sub       one command each: arguments, then what it does
    checkpoints    files of weights: which is complete, how to read and write them
    watch          which file of a path to publish next
    console        what both share: exit codes, events, one-line errors, signals, progress bars

A command never shows a traceback: whatever goes wrong becomes one line on stderr that says what to do, and an exit
code. Importing these modules loads neither torch nor zmq, so that ``--help`` and usage errors answer at once.
"""
