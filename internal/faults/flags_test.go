package faults

import (
	"fmt"
	"testing"
)

func TestWithin(t *testing.T) {
	for n, want := range map[int]string{0: "--count 0: want 1 to 3", 1: "<nil>", 3: "<nil>", 4: "--count 4: want 1 to 3"} {
		if got := fmt.Sprint(Within("count", n, 1, 3)); got != want {
			t.Errorf("%d: %s, want %s", n, got, want)
		}
	}
}

func TestOneOf(t *testing.T) {
	for value, want := range map[string]string{"off": "<nil>", "": `--mode "" is none of on, off`} {
		if got := fmt.Sprint(OneOf("mode", value, "on", "off")); got != want {
			t.Errorf("%q: %s, want %s", value, got, want)
		}
	}
}
