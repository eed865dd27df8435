package console

import (
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
)

func TestFactorsHaveThreeDigits(t *testing.T) {
	for v, want := range map[float64]string{1.5: "1.5", 2.3456: "2.35", 99.96: "100", 1234: "1\u202f230", 481_234: "481\u202f000"} {
		testkit.Equal(t, times(v), want, "times(%v)", v)
	}
}
