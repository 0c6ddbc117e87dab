"""Sentences become imperatives only where that is what they say."""

import pytest

from hivetune.synth.sentences import capital, deed, excerpt, sentences


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Show only the units in this state. More.", "show only the units in this state"),
        ("Displays the slab cache of the kernel", "display the slab cache of the kernel"),
        ("This option copies each file to its target.", "copy each file to its target"),
        ("Can be used to list all sockets.", "list all sockets"),
        ("Number of lines to print.", ""),
        ("Time to wait for an answer, in seconds.", ""),
        ("List of files that are copied.", ""),
        ("Archive authentication support for packages.", ""),
        ("Archive the files of a folder.", "archive the files of a folder"),
        ("Takes a boolean argument.", ""),
        ("Takes time (in seconds) as argument.", ""),
        ("Output file name, for the record subcommand.", ""),
        ("Output each record on a line of its own.", "output each record on a line of its own"),
        ("Specifies the path of the file.", ""),
        ("Same as the option before it.", ""),
        ("The kernel is told of it.", ""),
        ("Print the names that are described below.", ""),
        ("Show the (units in this state.", ""),
    ],
)
def test_deeds(text: str, found: str) -> None:
    assert deed(text) == found


def test_what_is_told_ends_before_it_needs_the_rest_of_the_page() -> None:
    assert excerpt("show all units. They are listed below. More.") == "Show all units."
    assert excerpt("The following values are known:") == ""
    assert excerpt("One sentence here. A " + "word " * 100) == "One sentence here."
    assert excerpt("Listens on e.g. a port. It waits.") == "Listens on e.g. a port. It waits."


def test_names_keep_their_letters() -> None:
    assert capital("ssh connects to a host") == "ssh connects to a host"
    assert capital("copies files") == "Copies files" and capital("the host") == "The host"


def test_a_paragraph_without_an_end_gets_one() -> None:
    assert sentences("show this and exit\n\nThe mode is set") == ["show this and exit.", "The mode is set."]


def test_what_points_at_the_rest_of_the_page_is_left_out() -> None:
    assert excerpt("The command by default packs all tags. With this option it packs all refs.") == ""
    assert excerpt("Set one value. ### Parameters") == "Set one value."
    text = "Launches n copies of a worker. Usage 1: Launching two trainers as a function."
    assert excerpt(text) == "Launches n copies of a worker."
    assert (
        excerpt("It adds support for CUDA tensors. The other page has more details.")
        == "It adds support for CUDA tensors."
    )
