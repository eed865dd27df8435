package rpc

import (
	"cmp"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"slices"
	"sort"
	"strconv"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/service"
	"github.com/srtm-io/srtm/internal/topics"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/controller"
	"github.com/srtm-io/srtm/loaddistributor/learned"
	"github.com/srtm-io/srtm/loaddistributor/placement"
	"github.com/srtm-io/srtm/loaddistributor/sizing"
)

// Page sizes of ListTopics.
const (
	defaultPage = 100
	maxPage     = 1000
	// fullPage is the size in bytes at which a page of topics ends. A gRPC client accepts
	// 4 MiB by default, and one topic may have thousands of groups.
	fullPage = 1 << 20
	// maxPublishers is the maximum number of publishers on a page: about 1 MiB.
	maxPublishers = 10_000
)

// shownPublishers is the number of learned publishers shown if a request leaves out
// publishers.
const shownPublishers = 100

// GetTopic implements srtmv1.AdminServiceServer.
func (s *Server) GetTopic(ctx context.Context, req *srtmv1.GetTopicRequest) (*srtmv1.GetTopicResponse, error) {
	if err := s.view.Elsewhere(); err != nil { // the leader measures the topic
		return nil, toStatus(err)
	}
	topic, err := s.view.Topic(req.Name)
	if err != nil {
		return nil, toStatus(err)
	}
	publishers, next, err := publishersOf(topic, req)
	if err != nil {
		return nil, toStatus(err)
	}
	if req.PageToken != "" {
		return &srtmv1.GetTopicResponse{NextPageToken: next, Topic: &srtmv1.Topic{
			Spec: &srtmv1.TopicSpec{Name: topic.Spec.Name(), Publishers: publishersProto(publishers)}, Epoch: topic.Placement.Epoch(),
		}}, nil
	}
	p := s.topicNow(ctx, topic)
	p.Spec.Publishers = publishersProto(publishers)
	p.Status = s.view.Status(ctx, topic)
	limit := learned.Max
	if req.OmitPublishers {
		limit = shownPublishers
	}
	p.Learned = s.view.Learned(topic, limit)
	return &srtmv1.GetTopicResponse{Topic: p, NextPageToken: next}, nil
}

// publishersOf returns the requested declared publishers and the token of the next page,
// or "". A token holds the number of earlier publishers, the topic's epoch, and the last
// publisher.
func publishersOf(topic catalog.Topic, req *srtmv1.GetTopicRequest) (all []placement.Publisher, next string, err error) {
	var faults faults
	if req.PageSize < 0 || req.PageSize > maxPublishers {
		faults.Add("page_size", "%d is outside 0 to %d", req.PageSize, maxPublishers)
	}
	var first, epoch uint64
	var last string
	if req.PageToken != "" {
		token, err := base64.RawURLEncoding.DecodeString(req.PageToken)
		if parts := strings.SplitN(string(token), " ", 3); len(parts) == 3 {
			var err1, err2 error
			first, err1 = strconv.ParseUint(parts[0], 10, 31)
			epoch, err2 = strconv.ParseUint(parts[1], 10, 64)
			err, last = errors.Join(err, err1, err2), parts[2]
		}
		if err != nil || first == 0 {
			faults.Add("page_token", "is not of a previous response")
		}
	}
	if err := faults.Err(); err != nil || req.OmitPublishers {
		return nil, "", err
	}
	all = declared(topic.Spec)
	if first > 0 && (first > uint64(len(all)) || all[first-1].ID != last) {
		return nil, "", &controller.EpochError{Topic: topic.Spec.Name(), Expected: epoch, Present: topic.Placement.Epoch()}
	}
	if all = all[first:]; req.PageSize > 0 && len(all) > int(req.PageSize) {
		all = all[:req.PageSize]
		next = base64.RawURLEncoding.EncodeToString(fmt.Appendf(nil, "%d %d %s", first+uint64(len(all)), topic.Placement.Epoch(), all[len(all)-1].ID))
	}
	return all, next, nil
}

// declared returns the publishers that the topic's owner named.
func declared(s *catalog.Spec) []placement.Publisher {
	if s.Demand.Open {
		return nil // its publishers were learned
	}
	return s.Demand.Publishers
}

// ListTopics implements srtmv1.AdminServiceServer.
func (s *Server) ListTopics(_ context.Context, req *srtmv1.ListTopicsRequest) (*srtmv1.ListTopicsResponse, error) {
	size, after, err := s.page(req)
	if err != nil {
		return nil, toStatus(err)
	}
	topics := s.view.Topics(after, size+1)
	response := &srtmv1.ListTopicsResponse{}
	for i, bytes := 0, 0; i < min(size, len(topics)) && bytes < fullPage; i++ {
		topic := unconfirmed(topicProto(topics[i]), s.view.CatalogLowering(topics[i]), keptRaising(topics[i]))
		response.Topics = append(response.Topics, topic)
		bytes += proto.Size(topic)
	}
	if n := len(response.Topics); n < len(topics) {
		response.NextPageToken = pageToken(topics[n-1].Spec.Name())
	}
	return response, nil
}

// pageToken returns the token of the page that begins after the name.
func pageToken(name string) string { return base64.RawURLEncoding.EncodeToString([]byte(name)) }

// page returns the size of a page and the name that it begins after; "": the first page.
func (s *Server) page(req interface {
	GetPageSize() int32
	GetPageToken() string
}) (size int, after string, err error) {
	var faults faults
	size = pageSize(&faults, req.GetPageSize())
	name, err := base64.RawURLEncoding.DecodeString(req.GetPageToken())
	if err != nil {
		faults.Add("page_token", "is not of a previous response")
	}
	if err = faults.Err(); err == nil {
		err = s.view.Ready()
	}
	return size, string(name), err
}

// pageSize returns the size of a page.
func pageSize(bad *faults, size int32) int {
	if size < 0 || size > maxPage {
		bad.Add("page_size", "%d is outside 0 to %d", size, maxPage)
	}
	return cmp.Or(int(size), defaultPage)
}

// ListPublisherMoves implements srtmv1.AdminServiceServer.
func (s *Server) ListPublisherMoves(_ context.Context, req *srtmv1.ListPublisherMovesRequest) (*srtmv1.ListPublisherMovesResponse, error) {
	var faults faults
	size, before := pageSize(&faults, req.PageSize), uint64(0)
	if req.PageToken != "" {
		var err error
		if before, err = strconv.ParseUint(req.PageToken, 36, 64); err != nil || before == 0 {
			faults.Add("page_token", "is not of a previous response")
		}
	}
	if err := faults.Err(); err != nil {
		return nil, toStatus(err)
	}
	if err := s.view.Elsewhere(); err != nil { // the leader keeps the moves
		return nil, toStatus(err)
	}
	moves, next, forgotten, err := s.view.Moves(req.Topic, before, size)
	if err != nil {
		return nil, toStatus(err)
	}
	response := &srtmv1.ListPublisherMovesResponse{Moves: moves, Forgotten: forgotten}
	if next > 0 {
		response.NextPageToken = strconv.FormatUint(next, 36)
	}
	return response, nil
}

// DeleteTopic implements srtmv1.AdminServiceServer.
func (s *Server) DeleteTopic(ctx context.Context, req *srtmv1.DeleteTopicRequest) (*srtmv1.DeleteTopicResponse, error) {
	if err := s.requireOwner(ctx, req.Name); err != nil {
		return nil, toStatus(err)
	}
	if err := s.controller.Delete(ctx, req.Name); err != nil {
		return nil, toStatus(err)
	}
	return &srtmv1.DeleteTopicResponse{Lowering: s.controller.View().Lowering(ctx, req.Name)}, nil
}

// ListBrokers implements srtmv1.AdminServiceServer.
func (s *Server) ListBrokers(_ context.Context, req *srtmv1.ListBrokersRequest) (*srtmv1.ListBrokersResponse, error) {
	size, after, err := s.page(req)
	if err != nil {
		return nil, toStatus(err)
	}
	brokers := s.controller.View().Brokers() // by id
	brokers = brokers[sort.Search(len(brokers), func(i int) bool { return brokers[i].ID > after }):]
	response := &srtmv1.ListBrokersResponse{}
	if req.PageSize > 0 && len(brokers) > size {
		brokers = brokers[:size]
		response.NextPageToken = pageToken(brokers[size-1].ID)
	}
	for _, b := range brokers {
		response.Brokers = append(response.Brokers, s.brokerProto(b))
	}
	return response, nil
}

// UpdateTopic implements srtmv1.AdminServiceServer.
func (s *Server) UpdateTopic(ctx context.Context, req *srtmv1.UpdateTopicRequest) (*srtmv1.UpdateTopicResponse, error) {
	err := checkUpdate(req)
	if err == nil {
		err = s.permit(ctx)
	}
	if err != nil {
		return nil, toStatus(err)
	}
	topic, err := s.controller.Update(ctx, req.Spec.Name, req.ExpectedEpoch, func(present *catalog.Spec) (*catalog.Spec, error) {
		if err := mayChange(ctx, present); err != nil {
			return nil, err
		}
		spec, err := checkCreate(&srtmv1.CreateTopicRequest{Spec: updated(present, req)})
		if err == nil && spec.Durability != present.Durability {
			err = faults{{Field: "spec.durability", Problem: "cannot be changed"}}
		}
		if err == nil {
			spec.Tenant = present.Tenant
			spec.Auto.Measured = spec.Auto.Measured && present.Auto.Measured
			if spec.Demand.Open && present.Demand.Open {
				spec.Demand.Publishers, spec.Since = learned.ScaleTo(present.Demand.Publishers, float64(spec.Demand.RateMilli)/1000), present.Since
			}
		}
		return spec, err
	})
	if err == nil && namesChannels(req) {
		// Includes channels deleted since the topic was declared with them.
		_, err = s.controller.ChangeChannel(ctx, req.Spec.Name, srtmv1.ChannelChange_CHANNEL_CHANGE_CREATE, req.Spec.Channels...)
	}
	if err == nil {
		topic, err = s.controller.View().Topic(req.Spec.Name)
	}
	if err != nil {
		return nil, toStatus(err)
	}
	return &srtmv1.UpdateTopicResponse{Topic: s.topicNow(ctx, topic)}, nil
}

// namesChannels reports whether an update names channels.
func namesChannels(req *srtmv1.UpdateTopicRequest) bool {
	return len(req.Spec.Channels) > 0 && (req.UpdateMask == nil || slices.Contains(req.UpdateMask.Paths, "channels"))
}

// updated returns the specification that a request makes from the present specification.
// Requires: checkUpdate has accepted the request.
func updated(present *catalog.Spec, req *srtmv1.UpdateTopicRequest) *srtmv1.TopicSpec {
	if req.UpdateMask == nil {
		merged := proto.CloneOf(req.Spec)
		merged.PlacementPolicy = cmp.Or(merged.PlacementPolicy, present.Policy)
		merged.ShareRule = cmp.Or(merged.ShareRule, present.ShareRule)
		merged.Durability = cmp.Or(merged.Durability, controller.Durabilities.Number(present.Durability))
		return merged
	}
	merged := specProto(present)
	merged.Publishers = publishersProto(declared(present))
	paths := req.UpdateMask.Paths
	for _, path := range paths {
		copyField(merged.ProtoReflect(), req.Spec.ProtoReflect(), strings.Split(path, "."))
	}
	if namesContract(paths) && !slices.ContainsFunc(paths, func(path string) bool { return path == "auto" || strings.HasPrefix(path, "auto.") }) {
		merged.Auto = nil // else the measured contract would replace the named contract
	}
	return merged
}

// namesContract reports whether the paths of an update name the rate or the burst.
func namesContract(paths []string) bool {
	return slices.ContainsFunc(paths, func(path string) bool {
		return path == "contract" || path == "contract.rate_milli" || path == "contract.burst"
	})
}

// copyField copies a field from one message to another of the same type. Both then share
// the value. Requires: the path names messages, except for its last element.
func copyField(dst, src protoreflect.Message, path []string) {
	field := dst.Descriptor().Fields().ByName(protoreflect.Name(path[0]))
	switch {
	case len(path) > 1:
		copyField(dst.Mutable(field).Message(), src.Get(field).Message(), path[1:])
	case src.Has(field):
		dst.Set(field, src.Get(field))
	default:
		dst.Clear(field)
	}
}

// DrainBroker implements srtmv1.AdminServiceServer.
func (s *Server) DrainBroker(ctx context.Context, req *srtmv1.DrainBrokerRequest) (*srtmv1.DrainBrokerResponse, error) {
	if req.Undo && req.Force {
		return nil, toStatus(faults{{Field: "force", Problem: "a drain that is undone cannot be forced"}})
	}
	b, err := s.controller.Drain(ctx, req.BrokerId, !req.Undo, req.Force)
	if err != nil {
		return nil, toStatus(err)
	}
	return &srtmv1.DrainBrokerResponse{Broker: s.brokerProto(b)}, nil
}

// SetBrokerCapacity implements srtmv1.AdminServiceServer.
func (s *Server) SetBrokerCapacity(_ context.Context, req *srtmv1.SetBrokerCapacityRequest) (*srtmv1.SetBrokerCapacityResponse, error) {
	if req.Mcap < 0 || req.Mcap > maxMcap {
		return nil, toStatus(faults{{Field: "mcap", Problem: fmt.Sprintf("%d msg/s is outside 0 to %d", req.Mcap, maxMcap)}})
	}
	b, err := s.controller.Calibrate(req.BrokerId, req.Mcap)
	if err != nil {
		return nil, toStatus(err)
	}
	return &srtmv1.SetBrokerCapacityResponse{Broker: s.brokerProto(b)}, nil
}

// RemoveBroker implements srtmv1.AdminServiceServer.
func (s *Server) RemoveBroker(ctx context.Context, req *srtmv1.RemoveBrokerRequest) (*srtmv1.RemoveBrokerResponse, error) {
	freed, remaining, err := s.controller.RemoveBroker(ctx, req.BrokerId)
	return &srtmv1.RemoveBrokerResponse{Freed: freed, Left: remaining}, toStatus(err)
}

// maxMoved is the maximum number of publishers in one MovePublishers.
const maxMoved = 10_000

// MovePublishers implements srtmv1.AdminServiceServer.
func (s *Server) MovePublishers(ctx context.Context, req *srtmv1.MovePublishersRequest) (*srtmv1.MovePublishersResponse, error) {
	var faults faults
	selected := req.All || req.Group != nil || req.FromBrokerId != ""
	switch n := len(req.PublisherIds); {
	case selected && n > 0:
		faults.Add("publisher_ids", "goes with none of all, group and from_broker_id")
	case !selected && (n < 1 || n > maxMoved):
		faults.Add("publisher_ids", "%d, want 1 to %d, or one of all, group and from_broker_id", n, maxMoved)
	}
	faults.Name("broker_id", req.BrokerId)
	if req.FromBrokerId != "" {
		faults.Name("from_broker_id", req.FromBrokerId)
	}
	err := faults.Err()
	if err == nil {
		err = s.permit(ctx)
	}
	if err != nil {
		return nil, toStatus(err)
	}
	if err := s.requireOwner(ctx, req.Topic); err != nil {
		return nil, toStatus(err)
	}
	publishers := controller.Publishers{IDs: req.PublisherIds, Group: req.Group, From: req.FromBrokerId}
	topic, err := s.controller.MovePublishers(ctx, req.Topic, publishers, req.BrokerId)
	if err != nil {
		return nil, toStatus(err)
	}
	return &srtmv1.MovePublishersResponse{Topic: s.topicNow(ctx, topic)}, nil
}

// SeekChannel implements srtmv1.AdminServiceServer.
func (s *Server) SeekChannel(ctx context.Context, req *srtmv1.SeekChannelRequest) (*srtmv1.SeekChannelResponse, error) {
	err := checkSeek(req)
	if err == nil {
		err = s.requireOwner(ctx, req.Topic)
	}
	if err != nil {
		return nil, toStatus(err)
	}
	outcomes, err := s.controller.SeekChannel(ctx, req.Topic, req.Channel, req.To, req.BrokerId)
	return &srtmv1.SeekChannelResponse{Brokers: outcomes}, toStatus(err)
}

// ListChannels implements srtmv1.AdminServiceServer.
func (s *Server) ListChannels(_ context.Context, req *srtmv1.ListChannelsRequest) (*srtmv1.ListChannelsResponse, error) {
	channels, err := s.controller.View().Channels(req.Topic)
	if err != nil {
		return nil, toStatus(err)
	}
	return &srtmv1.ListChannelsResponse{Channels: channels}, nil
}

// changeChannel changes a channel of a topic and returns the brokers that apply the
// change later.
func (s *Server) changeChannel(ctx context.Context, change srtmv1.ChannelChange, topic, channel string) (pending []string, err error) {
	if err = checkChannel(topic, channel); err == nil {
		err = s.permit(ctx)
	}
	if err == nil {
		err = s.requireOwner(ctx, topic)
	}
	if err == nil {
		pending, err = s.controller.ChangeChannel(ctx, topic, change, channel)
	}
	return pending, toStatus(err)
}

// CreateChannel implements srtmv1.AdminServiceServer.
func (s *Server) CreateChannel(ctx context.Context, req *srtmv1.CreateChannelRequest) (*srtmv1.CreateChannelResponse, error) {
	pending, err := s.changeChannel(ctx, srtmv1.ChannelChange_CHANNEL_CHANGE_CREATE, req.Topic, req.Channel)
	return &srtmv1.CreateChannelResponse{Pending: pending}, err
}

// PauseChannel implements srtmv1.AdminServiceServer.
func (s *Server) PauseChannel(ctx context.Context, req *srtmv1.PauseChannelRequest) (*srtmv1.PauseChannelResponse, error) {
	pending, err := s.changeChannel(ctx, srtmv1.ChannelChange_CHANNEL_CHANGE_PAUSE, req.Topic, req.Channel)
	return &srtmv1.PauseChannelResponse{Pending: pending}, err
}

// UnpauseChannel implements srtmv1.AdminServiceServer.
func (s *Server) UnpauseChannel(ctx context.Context, req *srtmv1.UnpauseChannelRequest) (*srtmv1.UnpauseChannelResponse, error) {
	pending, err := s.changeChannel(ctx, srtmv1.ChannelChange_CHANNEL_CHANGE_UNPAUSE, req.Topic, req.Channel)
	return &srtmv1.UnpauseChannelResponse{Pending: pending}, err
}

// DeleteChannel implements srtmv1.AdminServiceServer.
func (s *Server) DeleteChannel(ctx context.Context, req *srtmv1.DeleteChannelRequest) (*srtmv1.DeleteChannelResponse, error) {
	pending, err := s.changeChannel(ctx, srtmv1.ChannelChange_CHANNEL_CHANGE_DELETE, req.Topic, req.Channel)
	return &srtmv1.DeleteChannelResponse{Pending: pending}, err
}

// EmptyChannel implements srtmv1.AdminServiceServer.
func (s *Server) EmptyChannel(ctx context.Context, req *srtmv1.EmptyChannelRequest) (*srtmv1.EmptyChannelResponse, error) {
	err := checkChannel(req.Topic, req.Channel)
	if err == nil {
		err = s.permit(ctx)
	}
	if err == nil {
		err = s.requireOwner(ctx, req.Topic)
	}
	if err != nil {
		return nil, toStatus(err)
	}
	outcomes, err := s.controller.SeekChannel(ctx, req.Topic, req.Channel, nil, "")
	return &srtmv1.EmptyChannelResponse{Brokers: outcomes}, toStatus(err)
}

func (s *Server) brokerProto(b catalog.Broker) *srtmv1.Broker {
	waits, safe := s.controller.View().DrainWaits(b.ID)
	return &srtmv1.Broker{
		Id: b.ID, TcpAddress: b.TCPAddress, HttpAddress: b.HTTPAddress, MqttAddress: b.MQTTAddress, MqttsAddress: b.MQTTSAddress,
		Mcap: b.Mcap, Allocated: b.Allocated, Connected: b.Connected, Version: b.Version,
		ConfiguredMcap: b.Configured, CalibratedMcap: b.Calibrated,
		Draining: b.Draining, Forced: b.Forced, Topics: s.controller.View().BrokerTopics(b.ID), Waits: waits, SafeToStop: safe,
		OfferedRate: s.controller.View().Offered(b.ID), DataPath: b.Folder, Refused: refusedProto(s.controller.View().Refused(b.ID)),
	}
}

func refusedProto(r controller.Refusal, exists bool) *srtmv1.RefusedProcess {
	if !exists {
		return nil
	}
	return &srtmv1.RefusedProcess{
		TcpAddress: r.Place.Address, Hostname: r.Place.Host, DataPath: r.Place.Folder, Last: timestamppb.New(r.Last), Count: r.Count,
	}
}

var states = service.Enum[srtmv1.TopicState, catalog.State]{
	srtmv1.TopicState_TOPIC_STATE_PREPARING: catalog.Preparing,
	srtmv1.TopicState_TOPIC_STATE_ACTIVE:    catalog.Active,
	srtmv1.TopicState_TOPIC_STATE_DEGRADED:  catalog.Degraded,
	srtmv1.TopicState_TOPIC_STATE_DELETING:  catalog.Deleting,
}

// topicProto converts a topic without its publishers.
func topicProto(t catalog.Topic) *srtmv1.Topic {
	p := &srtmv1.Topic{
		Spec: specProto(t.Spec), State: states.Number(t.State), Reason: t.Reason, Epoch: t.Placement.Epoch(),
	}
	// A declared channel may have been deleted since.
	p.Spec.Channels = slices.DeleteFunc(slices.Clone(p.Spec.Channels), func(name string) bool { _, found := t.Channel(name); return !found })
	for _, q := range t.Plan.Quotas {
		p.Quotas = append(p.Quotas, quotaProto(q, t.Spec.Demand))
	}
	return p
}

// topicNow is topicProto with the adaptor's knowledge of brokers that may use more than
// the contract.
func (s *Server) topicNow(ctx context.Context, t catalog.Topic) *srtmv1.Topic {
	return unconfirmed(topicProto(t), s.controller.View().Lowering(ctx, t.Spec.Name()), s.controller.View().Raising(ctx, t))
}

// unconfirmed shows a topic in state LOWERING or RAISING. If both are nil, the state
// stays.
func unconfirmed(p *srtmv1.Topic, l *srtmv1.Lowering, r *srtmv1.Raising) *srtmv1.Topic {
	if l == nil && r == nil || p.State != srtmv1.TopicState_TOPIC_STATE_ACTIVE && p.State != srtmv1.TopicState_TOPIC_STATE_DEGRADED {
		return p
	}
	var reasons []string
	if p.State, p.Lowering, p.Raising = srtmv1.TopicState_TOPIC_STATE_RAISING, l, r; l != nil {
		p.State, reasons = srtmv1.TopicState_TOPIC_STATE_LOWERING, append(reasons, topics.Lowering(l))
	}
	if r != nil {
		reasons = append(reasons, topics.Raising(r))
	}
	if p.Reason != "" {
		reasons = append(reasons, p.Reason)
	}
	p.Reason = strings.Join(reasons, "; ")
	return p
}

// keptRaising computes Raising from the catalog, without the adaptor.
func keptRaising(t catalog.Topic) *srtmv1.Raising {
	if !t.Raising {
		return nil
	}
	return &srtmv1.Raising{}
}

func quotaProto(q placement.Quota, d placement.Demand) *srtmv1.BrokerQuota {
	keys := d.Keys(q.Publishers)
	p := &srtmv1.BrokerQuota{
		BrokerId: q.Broker, Rate: q.Rate, Publishers: uint32(len(q.Publishers)),
		Groups: make(map[string]uint32, len(keys)), Share: service.ShareProto(q.Share),
	}
	for key, n := range keys {
		p.Groups[key] = uint32(n)
	}
	return p
}

func specProto(s *catalog.Spec) *srtmv1.TopicSpec {
	p := &srtmv1.TopicSpec{
		Name: s.Name(), Contract: controller.ContractProto(s),
		PlacementPolicy: s.Policy, Channels: s.Channels, ShareRule: s.ShareRule, Pacing: controller.Pacings.Number(s.Pacing), Durability: controller.Durabilities.Number(s.Durability),
	}
	if a := s.Auto; a != (catalog.Auto{}) {
		p.Auto = &srtmv1.AutoContract{MaxRateMilli: a.MaxRate, MinBurst: a.MinBurst, MaxBurst: a.MaxBurst, Measured: a.Measured}
	}
	p.Expiry, p.ChannelExpiry = service.ExpiryProto(s.Expiry), service.ChannelExpiryProto(s.ChannelExpiry)
	for _, g := range s.Demand.Groups {
		p.Groups = append(p.Groups, &srtmv1.PublisherGroup{Key: g.Key, Count: int32(g.Count), Rate: g.Rate, Batch: int32(g.Batch), Weight: uint32(g.Weight)})
	}
	return p
}

func publishersProto(all []placement.Publisher) (p []*srtmv1.Publisher) {
	for _, publisher := range all {
		p = append(p, &srtmv1.Publisher{Id: publisher.ID, CorrelationKey: publisher.Key, Rate: publisher.Rate, Batch: int32(publisher.Batch)})
	}
	return p
}

// Watch implements srtmv1.PlacementServiceServer.
func (s *Server) Watch(req *srtmv1.WatchRequest, stream grpc.ServerStreamingServer[srtmv1.WatchResponse]) error {
	var faults faults
	if len(req.PublisherIds) > maxWatched {
		faults.Add("publisher_ids", "%d, at most %d; none stands for all", len(req.PublisherIds), maxWatched)
	} else {
		seen := make(map[string]int, len(req.PublisherIds))
		for i, id := range req.PublisherIds {
			if first, twice := seen[id]; twice {
				faults.Add("publisher_ids", "[%d] and [%d] are both %.80q", first, i, id)
			}
			seen[id] = i
		}
	}
	if err := faults.Err(); err != nil {
		return toStatus(err)
	}
	return toStatus(s.controller.View().Watch(stream.Context(), req.Topic, req.PublisherIds, func(c controller.Change) error {
		response := &srtmv1.WatchResponse{Epoch: c.Epoch, More: c.More}
		for _, a := range c.Assignments {
			response.Assignments = append(response.Assignments, assignmentProto(a))
		}
		return stream.Send(response)
	}))
}

func assignmentProto(a catalog.Assignment) *srtmv1.Assignment {
	return &srtmv1.Assignment{
		PublisherId: a.Publisher, BrokerId: a.Broker, TcpAddress: a.TCPAddress, HttpAddress: a.HTTPAddress, MqttAddress: a.MQTTAddress, MqttsAddress: a.MQTTSAddress,
		Epoch: a.Epoch, Unknown: a.Unknown, Pacing: a.Paced,
	}
}

// piece is the size of a message of an export. maxImport is the maximum size of an
// import.
const (
	piece     = 1 << 18
	maxImport = 1 << 28
)

// ExportCluster implements srtmv1.AdminServiceServer.
func (s *Server) ExportCluster(_ *srtmv1.ExportClusterRequest, stream grpc.ServerStreamingServer[srtmv1.ExportClusterResponse]) error {
	text, err := s.controller.View().Export()
	if err != nil {
		return toStatus(err)
	}
	for part := range slices.Chunk(text, piece) {
		if err := stream.Send(&srtmv1.ExportClusterResponse{Text: part}); err != nil {
			return err
		}
	}
	return nil
}

// ImportCluster implements srtmv1.AdminServiceServer.
func (s *Server) ImportCluster(stream grpc.ClientStreamingServer[srtmv1.ImportClusterRequest, srtmv1.ImportClusterResponse]) error {
	var text []byte
	for {
		m, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
		if text = append(text, m.Text...); len(text) > maxImport {
			return toStatus(&controller.BadMessage{Field: "text", Problem: fmt.Sprintf("has more than %d bytes", maxImport)})
		}
	}
	imported, err := s.controller.Import(text)
	if err != nil {
		return toStatus(err)
	}
	return stream.SendAndClose(&srtmv1.ImportClusterResponse{Topics: uint32(imported.Topics), Brokers: uint32(imported.Brokers), LeftOut: imported.LeftOut})
}

// ProfileTopic implements srtmv1.AdminServiceServer.
func (s *Server) ProfileTopic(req *srtmv1.ProfileTopicRequest, stream grpc.ServerStreamingServer[srtmv1.ProfileTopicResponse]) error {
	w, err := checkProfile(req)
	if err == nil {
		err = s.permit(stream.Context())
	}
	if err != nil {
		return toStatus(err)
	}
	if err := s.requireOwner(stream.Context(), req.Name); err != nil {
		return toStatus(err)
	}
	profile, err := s.controller.Profile(stream.Context(), req.Name, req.Lasts.AsDuration(), w, func(messages int) error {
		return stream.Send(&srtmv1.ProfileTopicResponse{Messages: uint64(messages)})
	})
	if err != nil {
		return toStatus(err)
	}
	p := &srtmv1.Profile{
		Share: service.ShareProto(profile.Share), NeededBurst: profile.Needed, Messages: uint64(profile.Messages),
		Span: durationpb.New(profile.Span), MeanRate: profile.Mean, Missing: profile.Missing,
	}
	delays := func(d sizing.Delays) *srtmv1.AccessDelays {
		return &srtmv1.AccessDelays{Mean: durationpb.New(d.Mean), Quantile: durationpb.New(d.Quantile), Late: d.Late}
	}
	for _, split := range profile.Splits {
		p.Splits = append(p.Splits, &srtmv1.SplitCost{Brokers: uint32(split.K), Delays: delays(split.Delays)})
	}
	for _, e := range profile.Errors {
		p.Wrong = append(p.Wrong, &srtmv1.WrongContract{What: e.Change, Share: service.ShareProto(e.Share), Delays: delays(e.Delays), Unbounded: e.Unbounded})
	}
	return stream.Send(&srtmv1.ProfileTopicResponse{Messages: uint64(profile.Messages), Profile: p})
}
