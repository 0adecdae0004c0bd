"""How script and peer hand over to each other."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from peer.library.meeting import End, Meeting, Train
from peer.node.local_steps import StepAbandoned


def test_a_script_whose_peer_is_lost_hears_of_that_and_not_of_what_it_was_asked_before() -> None:
    meeting, abandoned = Meeting(threading.current_thread()), threading.Event()

    def ask() -> None:
        with pytest.raises(StepAbandoned):
            meeting.ask(Train(np.zeros(3, np.float32), 5))
        abandoned.set()

    peer = threading.Thread(target=ask)
    peer.start()
    assert isinstance(meeting.next(), Train)
    assert not meeting.is_lost
    # It trains, and has not answered yet.
    meeting.abandon()
    peer.join()
    assert abandoned.is_set()
    end = End(begin_again=lambda: None)
    later = threading.Timer(0.05, meeting.end, [end])
    later.start()
    assert meeting.next() is end
    assert meeting.is_lost
    later.join()
