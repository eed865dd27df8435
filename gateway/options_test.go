package main

import (
	"math"
	"testing"
)

func TestConnectionsFitTheDescriptors(t *testing.T) {
	for descriptors, want := range map[int64]int{1: 1, 1024: 384, 65_536: 27_768, 1 << 20: 50_000, math.MaxInt64: 50_000} {
		if got := defaultConnections(descriptors); got != want {
			t.Errorf("%d connections of %d descriptors, want %d", got, descriptors, want)
		}
	}
}
