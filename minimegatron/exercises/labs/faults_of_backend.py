"""Known mistakes in the backend over shared memory, as patches.

Megatron has no counterpart.
"""

from minimegatron.exercises.labs.fault import Fault

FAULTS_OF_BACKEND = (
    Fault(
        "who-waits-reads-for-itself-alone",
        "backend/waiting.py",
        "        for number, reference in list(self.expecting.items()):\n",
        "        for number, reference in ():\n",
        "A rank that waits for one message leaves those of other ranks in their slots. Two ranks that "
        "each wait until the other takes what it has sent wait until the time-out.",
    ),
    Fault(
        "who-comes-later-does-not-ring",
        "backend/waiting.py",
        "if any(one not in self._watched for one in self._open(connection)):",
        "if False:",
        "A thread that begins to wait while another one sleeps in poll is not read for.",
    ),
    Fault(
        "takes-the-later-part-first",
        "backend/channels.py",
        "while self.is_open and reader.reading is not self:",
        "while self.is_open:",
        "A thread that looks takes what follows the bytes that another one has read and not yet taken.",
    ),
    Fault(
        "any-call-will-do",
        "backend/channels.py",
        "if num_bytes != wanted or message.call != self.call:",
        "if num_bytes != wanted:",
        "A rank that calls a maximum and one that calls a sum combine their numbers, each in its way.",
    ),
    Fault(
        "results-for-who-waits-alone",
        "backend/works.py",
        "                    arrival.then = self._one_came\n",
        "                    pass\n",
        "A collective whose handle nobody keeps is never finished, and its slots are never free.",
    ),
    Fault(
        "any-number-of-gloos-collectives",
        "backend/gloo_inside.py",
        "        if (count := int(arrival.tensor)) != num_begun:\n",
        "        if (count := int(arrival.tensor)) < 0:\n",
        "After a step that failed, gloo adds a tensor of the failed step to one of the next.",
    ),
    Fault(
        "leaves-before-it-has-written",
        "backend/channels.py",
        "        self._writer.close()\n",
        "        self._socket.close()\n",
        "A rank that leaves the group takes with it what its sockets have not taken yet.",
    ),
)
