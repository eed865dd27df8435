package header_test

import (
	"encoding/hex"
	"errors"
	"math"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/pacing/header"
	"github.com/srtm-io/srtm/tokenbucket"
)

// The layouts byte by byte, as a reference for other implementations.
func TestLayouts(t *testing.T) {
	ok := header.OK{Paced: true, Overload: true, Weight: 10, Interval: 300 * time.Millisecond, Rate: 40_000, Burst: 7}
	const answer = "4f4b" + "01" + "03" + "0a" + "00" + "012c" + "0000000000009c40" + "00000007"
	if got := hex.EncodeToString(header.AppendOK(nil, ok)); got != answer {
		t.Errorf("OK\n%s, want\n%s", got, answer)
	}
	p := header.Packet{ToS: 8, RTT: 60_000, Throughput: 1_000_000, FairThroughput: header.Num, MeanRTT: 61_000}
	const packet = "01080000" + "0000ea60" + "00000000000f4240" + "ffffffffffffffff" + "0000ee48" + "00000000"
	if got := hex.EncodeToString(header.AppendPacket(nil, p)); got != packet {
		t.Errorf("packet\n%s, want\n%s", got, packet)
	}
}

// Three routers on a path: the sender receives the least rate, or Num if one router is overloaded.
func TestLowestFeedbackOfThePath(t *testing.T) {
	for _, c := range []struct{ path, want []uint64 }{
		{[]uint64{300, 200, 400}, []uint64{200, 2}},
		{[]uint64{0, 200, 0}, []uint64{200, 2}},
		{[]uint64{300, header.Num, 100}, []uint64{header.Num, 2}},
		{[]uint64{0, 0, 0}, []uint64{0, 0}},
	} {
		p := header.Packet{}
		for i, fair := range c.path {
			p.Lower(fair, uint32(i+1))
		}
		if p.FairThroughput != c.want[0] || uint64(p.MeanRTT) != c.want[1] {
			t.Errorf("%v gave %d of router %d, want %v", c.path, p.FairThroughput, p.MeanRTT, c.want)
		}
	}
}

// A value out of range is limited to the range that the other side accepts.
func TestOKIsCutToItsRange(t *testing.T) {
	for _, o := range []header.OK{
		{},
		{Paced: true},
		{Paced: true, Rate: -5, Burst: -5, Interval: -time.Second},
		{Paced: true, Rate: math.MaxInt64, Burst: math.MaxInt64, Interval: math.MaxInt64, Weight: 255},
		{Interval: time.Microsecond},
	} {
		got, err := header.ParseOK(header.AppendOK(nil, o))
		if err != nil || got.Paced != o.Paced || got.Rate > tokenbucket.MaxRate || got.Burst > tokenbucket.MaxBurst {
			t.Errorf("%+v came as %+v, %v", o, got, err)
		}
	}
}

func TestIsOK(t *testing.T) {
	long := string(header.AppendOK(nil, header.OK{Weight: 1}))
	for text, want := range map[string]bool{"OK": true, long: true, "": false, "O": false, "OKAY": false, "KO": false, "CLOSE_WAIT": false, long[1:]: false} {
		if header.IsOK(text) != want || header.IsOK([]byte(text)) != want {
			t.Errorf("IsOK(%q) is %v", text, !want)
		}
	}
}

func FuzzOK(f *testing.F) {
	f.Add([]byte("OK"))
	f.Add(header.AppendOK(nil, header.OK{Weight: 1, Interval: time.Second}))
	f.Add(header.AppendOK(nil, header.OK{Paced: true, Weight: 255, Interval: time.Minute, Rate: tokenbucket.MaxRate, Burst: tokenbucket.MaxBurst}))
	f.Fuzz(func(t *testing.T, d []byte) {
		o, err := header.ParseOK(d)
		if err != nil {
			if !errors.Is(err, header.ErrMalformed) || o != (header.OK{}) {
				t.Fatalf("%+v, %v", o, err)
			}
			return
		}
		if !header.IsOK(d) || o.Paced && (o.Rate < 1 || o.Burst < 1) {
			t.Fatalf("%x is %+v", d, o)
		}
		back, err := header.ParseOK(header.AppendOK(nil, o))
		if err != nil || back != o {
			t.Fatalf("%+v came as %+v, %v", o, back, err)
		}
	})
}

func FuzzPacket(f *testing.F) {
	f.Add(header.AppendPacket(nil, header.Packet{ToS: 1, FairThroughput: header.Num}))
	f.Fuzz(func(t *testing.T, d []byte) {
		p, err := header.ParsePacket(d)
		if (err == nil) != (len(d) == header.PacketSize && d[0] == header.Version) {
			t.Fatalf("%x: %v", d, err)
		}
		testkit.Result(header.ParsePacket(header.AppendPacket(nil, p))).MustEqual(t, p)
	})
}
