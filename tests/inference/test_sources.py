"""Which files a user means, and the names of what is drawn from them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from web_server import WebServer

from maskfleet.errors import DataError
from maskfleet.inference.sources import VideoOutput, find_sources, frames


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("a.jpg", "a.png", "b/A.JPG", "b/c.mp4", "notes.txt", ".hidden.jpg"):
        path = tmp_path / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "photos"


def test_a_folder_means_the_images_and_videos_below_it(photos: Path) -> None:
    found = find_sources(["photos"])
    assert [source.name for source in found] == ["a.jpg", "a.png", "b/A.JPG", "b/c.mp4"]
    assert [source.output for source in found] == ["a", "a-2", "b/A", "b/c"]
    assert [source.is_video for source in found] == [False, False, False, True]


def test_no_two_files_are_drawn_to_the_same_place(photos: Path) -> None:
    found = find_sources(["photos/a.jpg", str(photos / "a.png"), str(photos / "b" / "A.JPG"), "photos/../photos/a.png"])
    assert [source.output for source in found] == ["photos/a", "a", "A-2", "a-3"]


def test_a_file_named_twice_is_used_once_and_a_pattern_skips_other_files(photos: Path) -> None:
    found = find_sources(["photos/a.jpg", "photos/*"])
    assert [source.name for source in found] == ["photos/a.jpg", "photos/a.png"]
    assert len(find_sources(["photos/**/*"])) == 4


def test_all_missing_ones_are_named_at_once(photos: Path) -> None:
    with pytest.raises(DataError, match=r"in: nothing.jpg, \*.gif\n") as caught:
        find_sources(["photos/a.jpg", "nothing.jpg", "*.gif"])
    assert ".jpeg" in caught.value.remedy


def test_an_address_is_downloaded_and_named_without_its_query(photos: Path, tmp_path: Path, web: WebServer) -> None:
    web.files["/a.jpg"] = b"pixels"
    found = find_sources([f"{web.url}/a.jpg?signature=secret", "photos/b", f"{web.url}/a.jpg"])
    assert [source.name for source in found] == [f"{web.url}/a.jpg", "A.JPG", "c.mp4", f"{web.url}/a.jpg"]
    assert [source.output for source in found] == ["a", "A-2", "c", "a-3"]
    assert found[3].fetched(tmp_path).read_bytes() == b"pixels"
    assert found[1].fetched(tmp_path) == Path("photos/b/A.JPG")


def test_frames_of_a_video_come_back_in_rgb(tmp_path: Path) -> None:
    with VideoOutput(tmp_path / "clip.mp4") as video:
        for level in range(5):
            picture = np.zeros((64, 96, 3), np.uint8)
            picture[..., 0] = 50 * level  # red
            video.add(picture, 10.0)
    read = list(frames(tmp_path / "clip.mp4", max_mpx=1))
    assert [fps for _, fps in read] == [10.0] * 5
    for level, (picture, _) in enumerate(read):
        assert picture.shape == (64, 96, 3)
        assert abs(picture[..., 0].mean() - 50 * level) < 12
        assert picture[..., 2].mean() < 12
    assert [path.name for path in tmp_path.iterdir()] == ["clip.mp4"]


def test_a_video_that_is_none_and_one_that_is_too_large_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.mp4").write_bytes(b"no video")
    with pytest.raises(DataError, match="not a video"):
        list(frames(tmp_path / "x.mp4", max_mpx=1))
    with VideoOutput(tmp_path / "clip.mp4") as video:
        video.add(np.zeros((64, 96, 3), np.uint8), 10.0)
    with pytest.raises(DataError, match="million pixels"):
        list(frames(tmp_path / "clip.mp4", max_mpx=0.001))


def test_a_video_that_failed_leaves_no_file(tmp_path: Path) -> None:
    def fail() -> None:
        with VideoOutput(tmp_path / "clip.mp4") as video:
            video.add(np.zeros((64, 96, 3), np.uint8), 10.0)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert list(tmp_path.iterdir()) == []
