package tested

import "testing"

func TestNothing(*testing.T) {}
