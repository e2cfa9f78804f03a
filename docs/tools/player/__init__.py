"""Plans and recordings come in; what the scripts of player, replay and workbench load goes out."""
