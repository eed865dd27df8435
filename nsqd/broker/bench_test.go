package broker_test

import (
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/kernel/stamp"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/nsqd/broker"
)

// BenchmarkMessage publishes, delivers and finishes messages of 100 bytes, ten in each round.
func BenchmarkMessage(b *testing.B) {
	br := testkit.Result(broker.New(broker.Config{Capacity: 1000, MaxMemory: 1 << 30, MaxMsgTimeout: time.Minute, AutoCreate: true})).Must(b)
	defer br.Close()
	top := testkit.Result(br.CreateTopic("t")).Must(b)
	sub := testkit.Result(top.Subscribe("c", broker.Subscriber{MsgTimeout: time.Minute}, func() {})).Must(b)
	testkit.Must(b, sub.Ready(100))
	body := make([]byte, 100)
	size := wire.MessageFrameSize(len(body))
	var out broker.Outgoing
	ids, errs := make([]wire.MessageID, 0, 10), make([]error, 0, 10)
	b.ReportAllocs()
	for b.Loop() {
		now := clock.Mono()
		for range 10 {
			testkit.Must(b, top.Publish(now, 0, broker.Published{Body: body, Arrival: stamp.Arrival{At: now, Source: stamp.Exact}}))
		}
		out.Reset()
		sub.Take(&out, 1<<20)
		sub.Wrote(&out)
		ids = ids[:0]
		for in := out.Frames; len(in) > 0; in = in[size:] {
			m, err := wire.ParseMessage(in[wire.FrameOverhead:size])
			testkit.Must(b, err)
			ids = append(ids, m.ID)
		}
		errs = sub.FinishBatch(now, ids, errs[:0])
	}
}
