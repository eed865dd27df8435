package broker_test

import (
	"encoding/binary"
	"fmt"
	"math"
	"testing"

	"pgregory.net/rapid"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/nsqd/broker"
)

func TestHexDigitsAsFmtWritesThem(t *testing.T) {
	check := func(n uint32) error {
		got := string(binary.BigEndian.AppendUint64(nil, broker.HexOf(n)))
		if want := fmt.Sprintf("%08x", n); got != want {
			return fmt.Errorf("%d: %q, want %q", n, got, want)
		}
		return nil
	}
	for _, n := range []uint32{0, 9, 10, 0xf, 0x10, 0x01234567, 0x89abcdef, math.MaxUint32} {
		testkit.NoError(t, check(n))
	}
	rapid.Check(t, func(rt *rapid.T) {
		testkit.Must(rt, check(rapid.Uint32().Draw(rt, "n")))
	})
}
