"""docs/tour.toml, problems and exam.toml come in; the frame of a tour page, its map and exam go out."""
