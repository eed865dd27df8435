package wire

import (
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/testkit"
)

func noAllocs(t *testing.T, name string, f func()) {
	t.Helper()
	testkit.Equal(t, testing.AllocsPerRun(200, f), 0, "allocations of %s", name)
}

func TestSteadyStateAllocatesNothing(t *testing.T) {
	var id MessageID
	copy(id[:], testID)
	lim := DefaultLimits()
	body := make([]byte, 100)
	for name, in := range map[string][]byte{
		"PUB":   AppendPub(nil, "topic", body),
		"DPUB":  AppendDpub(nil, "topic", time.Second, body),
		"MPUB":  AppendMpub(nil, "topic", [][]byte{body, body, body}),
		"RDY":   AppendRdy(nil, 100),
		"FIN":   AppendFin(nil, id),
		"REQ":   AppendReq(nil, id, time.Second),
		"TOUCH": AppendTouch(nil, id),
		"NOP":   AppendNop(nil),
	} {
		noAllocs(t, "ParseCommand of "+name, func() {
			if _, n, _, err := ParseCommand(in, lim); n != len(in) || err != nil {
				t.Errorf("%s: n=%d, %v", name, n, err)
			}
		})
		noAllocs(t, "ParseCommand of half a "+name, func() {
			if _, n, need, err := ParseCommand(in[:len(in)/2], lim); n != 0 || need == 0 || err != nil {
				t.Errorf("%s: n=%d need=%d, %v", name, n, need, err)
			}
		})
	}
	cmd, _, _, err := ParseCommand(AppendMpub(nil, "topic", [][]byte{body, body, body}), lim)
	testkit.Must(t, err)
	sum := 0
	noAllocs(t, "Batch.Each", func() { cmd.Batch.Each(func(b []byte) { sum += len(b) }) })
	if sum == 0 {
		t.Error("Each gave nothing")
	}

	out := make([]byte, 0, 1024)
	limited := RateLimited(time.Second)
	bodies := [][]byte{body, body}
	for name, f := range map[string]func(){
		"AppendMessage":  func() { out = AppendMessage(out[:0], 1, 1, id, body) },
		"AppendResponse": func() { out = AppendResponse(out[:0], OK) },
		"AppendError":    func() { out = AppendError(out[:0], limited) },
		"AppendPub":      func() { out = AppendPub(out[:0], "topic", body) },
		"AppendMpub":     func() { out = AppendMpub(out[:0], "topic", bodies) },
		"AppendFin":      func() { out = AppendFin(out[:0], id) },
		"AppendRdy":      func() { out = AppendRdy(out[:0], 2500) },
	} {
		noAllocs(t, name, f)
	}
	frame := AppendMessage(nil, 1, 1, id, body)
	noAllocs(t, "ParseFrame and ParseMessage", func() {
		_, data, _, err := ParseFrame(frame, 1024)
		testkit.NoError(t, err)
		if m, err := ParseMessage(data); err != nil || len(m.Body) != len(body) {
			t.Error(err)
		}
	})
}

func BenchmarkParseCommand(b *testing.B) {
	var id MessageID
	copy(id[:], testID)
	lim := DefaultLimits()
	body := make([]byte, 100)
	many := make([][]byte, 200)
	for i := range many {
		many[i] = body
	}
	for _, bc := range []struct {
		name string
		in   []byte
	}{
		{"PUB", AppendPub(nil, "sensors.temperature", body)},
		{"FIN", AppendFin(nil, id)},
		{"MPUB200", AppendMpub(nil, "sensors.temperature", many)},
	} {
		b.Run(bc.name, func(b *testing.B) {
			b.ReportAllocs()
			b.SetBytes(int64(len(bc.in)))
			for b.Loop() {
				if _, n, _, _ := ParseCommand(bc.in, lim); n == 0 {
					b.Fatal("not parsed")
				}
			}
		})
	}
}

func BenchmarkAppendMessage(b *testing.B) {
	var id MessageID
	body := make([]byte, 100)
	out := make([]byte, 0, 256)
	b.ReportAllocs()
	for b.Loop() {
		out = AppendMessage(out[:0], 1, 1, id, body)
	}
}
