package rpc

import (
	"fmt"
	"time"

	"google.golang.org/protobuf/types/known/fieldmaskpb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/loaddistributor/controller"
	"github.com/srtm-io/srtm/loaddistributor/sizing"
)

// Limits of a request. The limits of publishers and groups are in placement.
const (
	// maxChannels is the maximum number of channels in a creation.
	maxChannels = 1000
	// maxKey is the maximum length of an idempotency key in bytes.
	maxKey = 128
	// maxMcap, in msg/s, is far above any broker's capacity, and sums of it do not
	// overflow.
	maxMcap = 1_000_000_000
	// maxWatched is the maximum number of publishers in one Watch.
	maxWatched = 100_000
	// maxPaths is the maximum number of fields in an update, more than a topic has.
	maxPaths = 100
)

// checkUpdate returns all faults of a request, except faults of the resulting
// specification, which checkCreate finds.
func checkUpdate(req *srtmv1.UpdateTopicRequest) error {
	var bad faults
	if req.Spec == nil {
		bad.Add("spec", "is missing")
	} else {
		bad.Name("spec.name", req.Spec.Name)
	}
	switch paths := req.UpdateMask.GetPaths(); {
	case req.UpdateMask == nil:
	case len(paths) == 0 || len(paths) > maxPaths:
		bad.Add("update_mask", "has %d paths, want 1 to %d; without a mask the whole specification is replaced", len(paths), maxPaths)
	default:
		for i, path := range paths {
			if mask := (&fieldmaskpb.FieldMask{Paths: []string{path}}); path == "name" || !mask.IsValid(req.Spec) {
				bad.Add(fmt.Sprintf("update_mask.paths[%d]", i), "%.80q is no field of a specification that can be changed", path)
			}
		}
	}
	return bad.Err()
}

// checkSeek returns all faults of a request. The brokers check whether the channel
// exists.
func checkSeek(req *srtmv1.SeekChannelRequest) error {
	var bad faults
	if req.Topic == "" {
		bad.Add("topic", "is missing")
	}
	if req.Channel == "" || len(req.Channel) > 64 {
		bad.Add("channel", "has %d bytes: want 1 to 64", len(req.Channel))
	}
	switch to := req.To.GetTo().(type) {
	case nil:
		bad.Add("to", "is missing: begin, end, time or offset")
	case *srtmv1.Place_Time:
		if year := to.Time.AsTime().Year(); !to.Time.IsValid() || year < 1970 || year > 2200 {
			bad.Add("to.time", "is not a time in the years 1970 to 2200")
		}
	}
	return bad.Err()
}

// checkChannel returns all faults of a request that changes a channel.
func checkChannel(topic, channel string) error {
	var bad faults
	if topic == "" {
		bad.Add("topic", "is missing")
	}
	bad.Name("channel", channel)
	return bad.Err()
}

// checkProfile returns the goal of a profile, or all faults of a request.
func checkProfile(req *srtmv1.ProfileTopicRequest) (sizing.Wanted, error) {
	var bad faults
	bad.Name("name", req.Name)
	if d := req.Lasts.AsDuration(); req.Lasts.CheckValid() != nil || d < 10*time.Second || d > 24*time.Hour {
		bad.Add("lasts", "%v is not 10s to 24h", d)
	}
	w := sizing.Wanted{
		Quantile: req.Quantile, Within: req.Within.AsDuration(), Confidence: req.Confidence,
		Headroom: req.Headroom, Brokers: int(min(req.Brokers, sizing.MaxBrokers+1)),
	}
	for field, problem := range w.Faults() {
		bad.Add(field, "%s", problem)
	}
	return w, bad.Err()
}

// checkHello returns all faults of a broker's hello.
func checkHello(h *srtmv1.BrokerHello) error {
	var bad faults
	bad.Name("hello.broker_id", h.BrokerId)
	if h.Instance == "" || len(h.Instance) > 128 {
		bad.Add("hello.instance", "has %d bytes: want 1 to 128", len(h.Instance))
	}
	for _, a := range []struct {
		field, address string
		optional       bool
	}{
		{"tcp_address", h.TcpAddress, false}, {"http_address", h.HttpAddress, false},
		{"mqtt_address", h.MqttAddress, true}, {"mqtts_address", h.MqttsAddress, true},
	} {
		if _, _, err := controller.HostPort(a.address); err != nil && (a.address != "" || !a.optional) {
			bad.Add("hello."+a.field, "%v", err)
		}
	}
	if len(h.Version) > 128 {
		bad.Add("hello.version", "has %d bytes, at most 128", len(h.Version))
	}
	if h.Mcap < 1 || h.Mcap > maxMcap {
		bad.Add("hello.mcap", "%d msg/s is outside 1 to %d", h.Mcap, maxMcap)
	}
	controller.PlaceOf(h).Check(bad.Add)
	return bad.Err()
}
