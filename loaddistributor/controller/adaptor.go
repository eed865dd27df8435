package controller

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/service"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/placement"
	"github.com/srtm-io/srtm/tbadaptor/adaptor"
	"github.com/srtm-io/srtm/tbadaptor/share"
	"github.com/srtm-io/srtm/tokenbucket"
)

// Adaptor divides contracts into shares and grants the shares to brokers. It is embedded
// (tbadaptor/loop.Server) or Remote. Its errors are gRPC statuses. Requests are plain
// values; answers are messages, because the API's answers contain them.
type Adaptor interface {
	// Set puts a contract in force, and takes ownership of the contract.
	Set(context.Context, *adaptor.Contract, adaptor.Mode) error
	// Remove ends a contract, and returns the shares that brokers still hold; nil: none.
	// The awaited brokers may use shares of the contract. The strict brokers among them
	// stop when their lease ends.
	Remove(ctx context.Context, topic string, awaited, strict []string) (*srtmv1.TopicShares, error)
	// Shares returns the shares of a topic; of all topics without a name. If the revision
	// of the shares is unless, Shares returns only the revision.
	Shares(ctx context.Context, topic string, unless uint64) (*srtmv1.ListSharesResponse, error)
	// Forget frees the shares of a broker that an operator declares dead.
	Forget(ctx context.Context, broker string) ([]*srtmv1.FreedShare, error)
	// End frees the shares of a broker's process that has ended.
	End(ctx context.Context, broker, instance string) ([]*srtmv1.FreedShare, error)
}

// Remote is an adaptor in another process. While no adaptor leads, calls wait until their
// context ends.
type Remote struct{ Client srtmv1.GrantServiceClient }

// Set implements Adaptor.
func (r Remote) Set(ctx context.Context, c *adaptor.Contract, mode adaptor.Mode) error {
	req := &srtmv1.SetContractRequest{
		Topic: c.Topic, Contract: &srtmv1.Contract{RateMilli: int64(c.Total.Rate), Burst: c.Total.Burst}, ShareRule: c.Rule,
		Awaited: c.Awaited, Strict: c.Strict, Update: mode == adaptor.Update, Adopt: mode == adaptor.Adopt,
	}
	req.Holders = c.Holders
	if !c.Former.IsZero() {
		req.Former = service.ShareProto(c.Former)
	}
	for _, p := range c.Placed {
		req.Members = append(req.Members, &srtmv1.Member{
			BrokerId: p.Broker, Share: service.ShareProto(p.Quota), Publishers: uint32(p.Publishers), Retiring: p.Retiring,
		})
	}
	_, err := await(ctx, req, r.Client.SetContract)
	return err
}

// Remove implements Adaptor.
func (r Remote) Remove(ctx context.Context, topic string, awaited, strict []string) (*srtmv1.TopicShares, error) {
	removed, err := await(ctx, &srtmv1.RemoveContractRequest{Topic: topic, Awaited: awaited, Strict: strict}, r.Client.RemoveContract)
	return removed.GetShares(), err
}

// Shares implements Adaptor.
func (r Remote) Shares(ctx context.Context, topic string, unless uint64) (*srtmv1.ListSharesResponse, error) {
	return await(ctx, &srtmv1.ListSharesRequest{Topic: topic, UnlessRevision: unless}, r.Client.ListShares)
}

// Forget implements Adaptor.
func (r Remote) Forget(ctx context.Context, broker string) ([]*srtmv1.FreedShare, error) {
	response, err := await(ctx, &srtmv1.ForgetBrokerRequest{BrokerId: broker}, r.Client.ForgetBroker)
	return response.GetFreed(), err
}

// End implements Adaptor.
func (r Remote) End(ctx context.Context, broker, instance string) ([]*srtmv1.FreedShare, error) {
	ended, err := await(ctx, &srtmv1.ReportEndRequest{BrokerId: broker, Instance: instance}, r.Client.ReportEnd)
	return ended.GetFreed(), err
}

// Pauses between two calls of an adaptor that does not lead.
const (
	firstPause   = 50 * time.Millisecond
	longestPause = 400 * time.Millisecond
)

// await repeats a call until a leading adaptor has answered. The calls are idempotent. If
// ctx ends first, await returns the last error.
func await[In, Out any](ctx context.Context, req *In, call func(context.Context, *In, ...grpc.CallOption) (*Out, error)) (*Out, error) {
	for pause := firstPause; ; pause = min(2*pause, longestPause) {
		response, err := call(ctx, req, grpc.WaitForReady(true))
		if !absent(err) || !clock.Sleep(ctx, pause) {
			return response, err
		}
	}
}

// reasonBusy is the adaptor's ErrorInfo reason if brokers may still use the contract of a
// removed topic.
const reasonBusy = "CONTRACT_BUSY"

// absent reports whether err means that no adaptor leads. A status without details comes
// from gRPC: the connection broke. A new adaptor leads within seconds, after the
// loaddistributor has granted it leadership. An adaptor that shuts down has a successor.
// With other details an adaptor has decided, and a repetition would not change the
// decision.
func absent(err error) bool {
	s, reason := status.Convert(err), service.Reason(err)
	return s.Code() == codes.Unavailable && (len(s.Details()) == 0 || reason == "NOT_LEADING" || reason == "SHUTTING_DOWN")
}

// grants calls an adaptor with a timeout.
type grants struct {
	Adaptor  // nil on a follower whose leader embeds the adaptor
	patience time.Duration
	life     context.Context // ends every call when the controller stops, with the cause
}

// withTimeout limits a call by patience and by life.
func (g grants) withTimeout(ctx context.Context, patience time.Duration) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	stop := context.AfterFunc(g.life, cancel)
	return ctx, func() {
		stop()
		cancel()
	}
}

// failed wraps the error of a call.
func (g grants) failed(err error) error {
	if cause := context.Cause(g.life); cause != nil {
		err = fmt.Errorf("%w: no answer of the adaptor: %w", cause, err)
	}
	return &AdaptorError{err}
}

// set sets a contract. Requires: c is from terms.contract.
func (g grants) set(ctx context.Context, c *adaptor.Contract, mode adaptor.Mode) error {
	ctx, cancel := g.withTimeout(ctx, g.patience)
	defer cancel()
	if err := g.Set(ctx, c, mode); err != nil {
		return g.failed(err)
	}
	return nil
}

// drop is Remove with the timeout.
func (g grants) drop(topic string, awaited, strict []string) (*srtmv1.TopicShares, error) {
	ctx, cancel := g.withTimeout(context.Background(), g.patience)
	defer cancel()
	return g.Remove(ctx, topic, awaited, strict)
}

// topic returns the adaptor's shares of a topic, or nil.
func (g grants) topic(ctx context.Context, topic string, patience time.Duration) (*srtmv1.TopicShares, error) {
	if g.Adaptor == nil {
		return nil, nil
	}
	ctx, cancel := g.withTimeout(ctx, patience)
	defer cancel()
	r, err := g.Shares(ctx, topic, 0)
	if err != nil {
		return nil, g.failed(err)
	}
	if len(r.Topics) == 0 {
		return nil, nil
	}
	return r.Topics[0], nil
}

// shares returns the adaptor's shares of a topic, by broker.
func (g grants) shares(ctx context.Context, topic string, patience time.Duration) (map[string]*srtmv1.MemberShare, error) {
	t, err := g.topic(ctx, topic, patience)
	byBroker := map[string]*srtmv1.MemberShare{}
	for _, m := range t.GetMembers() {
		byBroker[m.BrokerId] = m
	}
	return byBroker, err
}

// A share has at least one token, and a contract has b tokens. While a topic moves from k
// brokers to others, it is on more than k brokers. With b = k there are too few tokens,
// so the brokers take turns, and the contract holds throughout. The brokers that the
// topic leaves keep tokens, with the rate of the brokers without tokens, until no message
// arrives there and none waits. The new brokers hold their accepted messages until then.
// The wait lasts until publishers have followed and reports show it. If messages arrive
// at the old brokers again, for example over HTTP, they get another turn.
//
// The design that lost refused such a move. Then a broker with such a topic could not be
// drained, and the topic could not leave an overloaded broker.

// terms builds contracts for the adaptor, and records the turns. The caller of a method
// holds the controller's lock.
type terms struct {
	cat     *pipeline
	brokers *brokers
	topics  *topics
}

// contract builds a topic's contract for the adaptor, and records the turn. Retiring
// brokers get a small share to release their messages. The contract excludes the part of
// publishers without a broker: the adaptor would give it to the others.
func (t *terms) contract(spec *catalog.Spec, plan placement.Plan, retiring []string) (*adaptor.Contract, error) {
	waitingBrokers := retiring
	if scarce(plan, retiring) {
		retiring = t.unspent(spec.Name(), retiring)
		turn := strings.Join(retiring, " ")
		t.topics.entry(spec.Name()).sentTurn = &turn
	}
	waitingBrokers = slices.DeleteFunc(slices.Clone(waitingBrokers), func(id string) bool { return slices.Contains(retiring, id) })
	shares, rest, err := placement.WithRetiring(plan, len(retiring))
	if err != nil {
		return nil, err
	}
	c := &adaptor.Contract{Topic: spec.Name(), Total: usedOf(plan), Rule: spec.ShareRule}
	place := func(p share.Placed) {
		if p.Quota.IsZero() {
			waitingBrokers = append(waitingBrokers, p.Broker)
		} else {
			c.Placed = append(c.Placed, p)
		}
	}
	for i, q := range plan.Quotas {
		place(share.Placed{Broker: q.Broker, Publishers: len(q.Publishers), Quota: shares[i]})
	}
	for i, id := range retiring {
		place(share.Placed{Broker: id, Quota: rest[i], Retiring: true})
	}
	ids := slices.Clone(waitingBrokers)
	for _, p := range c.Placed {
		ids = append(ids, p.Broker)
	}
	for _, s := range t.cat.next.Unconfirmed(spec.Name()) {
		if b, _ := t.cat.next.Broker(s.Broker); !slices.Contains(ids, s.Broker) && !b.Forgotten {
			waitingBrokers, ids = append(waitingBrokers, s.Broker), append(ids, s.Broker)
		}
	}
	c.Awaited = waitingBrokers
	if total, found := t.cat.former(spec.Name()); found {
		c.Former = total
	}
	for _, id := range ids {
		if b, _ := t.cat.next.Broker(id); b.Strict {
			c.Strict = append(c.Strict, id)
		}
	}
	return c, nil
}

// former returns the maximum that all brokers together may hold of a topic, if known.
func (p *pipeline) former(name string) (total tokenbucket.Share, found bool) {
	topic, found := p.next.Topic(name)
	if !found || topic.Vague {
		return total, false
	}
	total = topic.Spec.Contract()
	if topic.Next != nil { // an earlier controller may have sent the next contract to the adaptor
		total = total.Max(topic.Next.Spec.Contract())
	}
	for _, s := range topic.Unconfirmed {
		total.Rate, total.Burst = total.Rate+s.Share.Rate, total.Burst+s.Share.Burst
	}
	return total, total.Validate() == nil
}

// usedOf returns the part of the contract that a plan divides: all except the part of
// publishers without a broker.
func usedOf(plan placement.Plan) (sum tokenbucket.Share) {
	for _, q := range plan.Quotas {
		sum.Rate += q.Share.Rate
		sum.Burst += q.Share.Burst
	}
	return sum
}

// scarce reports whether there are fewer tokens than brokers that may need a token.
func scarce(plan placement.Plan, retiring []string) bool {
	return usedOf(plan).Burst < int64(len(plan.Quotas)+len(retiring))
}

// unspent returns the brokers that need tokens according to their last report: messages
// arrived or wait. An idle connection needs no token. Neither does a disconnected broker:
// the ledger reserves the share that it may be using.
func (t *terms) unspent(name string, ids []string) []string {
	return slices.DeleteFunc(slices.Clone(ids), func(id string) bool {
		t := t.brokers.reported(id).Topic(name)
		return t == nil || t.Newest().Stats.Offered+t.Newest().Stats.Backlog == 0
	})
}

// takesTurns reports whether the turn has changed since the last request to the adaptor.
func (t *terms) takesTurns(topic catalog.Topic) bool {
	name := topic.Spec.Name()
	if !scarce(topic.Plan, topic.Retiring) {
		t.topics.entry(name).sentTurn = nil
		return false
	}
	sentTurn := t.topics.peek(name).sentTurn
	return sentTurn == nil || *sentTurn != strings.Join(t.unspent(name, topic.Retiring), " ")
}
