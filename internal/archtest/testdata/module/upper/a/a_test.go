package a_test

import (
	"testing"

	_ "fixture.test/m/lower/y"
	_ "fixture.test/m/upper/a"
)

func TestNothing(*testing.T) {}
