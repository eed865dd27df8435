package topics

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/emptypb"
	"google.golang.org/protobuf/types/known/timestamppb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/plural"
	"github.com/srtm-io/srtm/internal/service"
)

// State returns a topic's state in lower case.
func State(s srtmv1.TopicState) string { return value(s.String(), "TOPIC_STATE_") }

// MoveReason returns the reason of a publisher's move in words.
func MoveReason(r srtmv1.MoveReason) string { return value(r.String(), "MOVE_REASON_") }

func value(name, prefix string) string {
	return strings.ReplaceAll(strings.ToLower(strings.TrimPrefix(name, prefix)), "_", " ")
}

// SLO formats an SLO in one line.
func SLO(s *srtmv1.Slo) string {
	return fmt.Sprintf("%.6g %% within %v", 100*s.GetQuantile(), s.GetLatency().AsDuration())
}

// PerSecond converts n to a rate over the interval of the statistics; 0 if the interval
// is unknown.
func PerSecond(n uint64, of *srtmv1.TopicStats) float64 {
	if d := of.GetInterval().AsDuration().Seconds(); d > 0 {
		return float64(n) / d
	}
	return 0
}

// ParsePlace parses the place where a channel resumes: begin, end, an offset, or a time.
func ParsePlace(text string) (*srtmv1.Place, bool) {
	switch text {
	case "begin":
		return &srtmv1.Place{To: &srtmv1.Place_Begin{Begin: &emptypb.Empty{}}}, true
	case "end":
		return &srtmv1.Place{To: &srtmv1.Place_End{End: &emptypb.Empty{}}}, true
	}
	if offset, err := strconv.ParseUint(text, 10, 64); err == nil {
		return &srtmv1.Place{To: &srtmv1.Place_Offset{Offset: offset}}, true
	}
	at, err := time.Parse(time.RFC3339Nano, text)
	return &srtmv1.Place{To: &srtmv1.Place_Time{Time: timestamppb.New(at)}}, err == nil
}

// GroupForm is the form that ParseGroup reads.
const GroupForm = "KEY:COUNT:RATE[:BATCH[:WEIGHT]]"

// ParseGroup parses a group of publishers in GroupForm.
func ParseGroup(text string) (*srtmv1.PublisherGroup, error) {
	parts := strings.Split(text, ":")
	if len(parts) < 3 || len(parts) > 5 {
		return nil, fmt.Errorf("want %s", GroupForm)
	}
	count, err := strconv.ParseInt(parts[1], 10, 32)
	if err != nil {
		return nil, fmt.Errorf("count %q is not a number of publishers", parts[1])
	}
	rate, batch, err := rateAndBatch(parts[2:])
	if err != nil {
		return nil, err
	}
	weight := uint64(0)
	if len(parts) == 5 {
		if weight, err = strconv.ParseUint(parts[4], 10, 8); err != nil {
			return nil, fmt.Errorf("weight %q is not a number in [1, 255]", parts[4])
		}
	}
	return &srtmv1.PublisherGroup{Key: parts[0], Count: int32(count), Rate: rate, Batch: batch, Weight: uint32(weight)}, nil
}

// PublisherForm is the form that ParsePublisher reads.
const PublisherForm = "ID:KEY:RATE[:BATCH]"

// ParsePublisher parses a publisher in PublisherForm.
func ParsePublisher(text string) (*srtmv1.Publisher, error) {
	parts := strings.Split(text, ":")
	if len(parts) < 3 || len(parts) > 4 {
		return nil, fmt.Errorf("want %s", PublisherForm)
	}
	rate, batch, err := rateAndBatch(parts[2:])
	if err != nil {
		return nil, err
	}
	return &srtmv1.Publisher{Id: parts[0], CorrelationKey: parts[1], Rate: rate, Batch: batch}, nil
}

func rateAndBatch(parts []string) (rate float64, batch int32, err error) {
	if rate, err = strconv.ParseFloat(parts[0], 64); err != nil {
		return 0, 0, fmt.Errorf("rate %q is not a number of messages per second", parts[0])
	}
	if len(parts) > 1 {
		n, err := strconv.ParseInt(parts[1], 10, 32)
		if err != nil {
			return 0, 0, fmt.Errorf("batch %q is not a number of messages", parts[1])
		}
		batch = int32(n)
	}
	return rate, batch, nil
}

// Lowering describes to people which brokers may use more than a contract.
func Lowering(l *srtmv1.Lowering) string {
	var list []string
	for _, b := range l.GetBrokers() {
		s := service.ShareOf(b.Share)
		text := fmt.Sprintf("broker %s may use %s msg/s and burst %d", b.BrokerId, s.Rate.Text(), s.Burst)
		switch {
		case b.Until != nil:
			text += fmt.Sprintf(" until %s (policy strict), at most %s", b.Until.AsTime().UTC().Format("2006-01-02 15:04:05 UTC"), plural.Count(b.MostMessages, "message"))
		case b.Connected:
			text += " until it confirms the smaller share"
		case b.Policy == srtmv1.LeasePolicy_LEASE_POLICY_STRICT:
			text += " until its lease ends (policy strict)"
		case b.Policy == srtmv1.LeasePolicy_LEASE_POLICY_AVAILABLE:
			text += fmt.Sprintf(", with no end: policy available; reach it, restart it, or `srtm share forget %s`", b.BrokerId)
		default:
			text += fmt.Sprintf(", with no end: it has no lease; reach it, restart it, or `srtm share forget %s`", b.BrokerId)
		}
		list = append(list, text)
	}
	return strings.Join(list, "; ")
}

// Raising describes to people how much of a raised contract is in force, and what delays
// the rest.
func Raising(r *srtmv1.Raising) string {
	text := "the raised contract is not in force on all brokers"
	if r.GetInForce() != nil {
		s := service.ShareOf(r.InForce)
		text = fmt.Sprintf("%s msg/s and burst %d of the raised contract are in force", s.Rate.Text(), s.Burst)
	}
	var list []string
	for _, b := range r.GetBrokers() {
		line := "broker " + b.BrokerId
		switch {
		case b.Connected:
			line += " to confirm its share"
		case b.Until != nil:
			line += fmt.Sprintf(", whose lease ends at %s (policy strict)", b.Until.AsTime().UTC().Format("2006-01-02 15:04:05 UTC"))
		default:
			line += fmt.Sprintf(" to return: reach it, restart it, or `srtm share forget %s`", b.BrokerId)
		}
		list = append(list, line)
	}
	if list != nil {
		text += "; the rest waits for " + strings.Join(list, ", and for ")
	}
	return text
}
