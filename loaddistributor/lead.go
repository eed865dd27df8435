package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/controller"
	"github.com/srtm-io/srtm/loaddistributor/store"
)

// Names of the stores.
const (
	storeBolt   = "bbolt"
	storeEtcd   = "etcd"
	storeMemory = "memory"
)

// Pauses of a follower: between attempts to lead while the store does not answer, and between look-ups
// of the leader.
const (
	leadPause = 500 * time.Millisecond
	lookPause = 500 * time.Millisecond
)

// role is a role that a process serves in: leader with a term, or follower of the store.
type role struct {
	term   store.Term
	cat    *catalog.Catalog // for a follower, the catalog from its time as leader; nil: the process has not led
	store  store.Store
	leader func() string // for a follower, the leader's address
}

func (o *options) openStore(ctx context.Context, log *slog.Logger) (store.Store, error) {
	switch o.store {
	case storeMemory:
		return &store.Memory{}, nil
	case storeBolt:
		b, err := store.NewBolt(o.dataPath, log)
		if err != nil {
			return nil, fmt.Errorf("--data-path: %w", err)
		}
		return b, nil
	}
	cfg, err := o.etcdConfig()
	if err != nil {
		return nil, err
	}
	e, err := store.NewEtcd(ctx, cfg)
	if err != nil {
		return nil, err
	}
	return e, nil
}

// etcdConfig reads the files with credentials for etcd, and returns all errors.
func (o *options) etcdConfig() (store.EtcdConfig, error) {
	var errs []error
	encrypted, err := o.etcdSecurity.TLS(etcdPrefix)
	errs = append(errs, err)
	password := ""
	switch {
	case (o.etcdUser == "") != (o.etcdPasswordFile == ""):
		errs = append(errs, errors.New("--etcd-user and --etcd-password-file: want both or neither"))
	case o.etcdUser != "":
		text, err := os.ReadFile(o.etcdPasswordFile)
		if password = strings.TrimRight(string(text), "\r\n"); err != nil {
			errs = append(errs, fmt.Errorf("--etcd-password-file: %w", err))
		} else if password == "" {
			errs = append(errs, fmt.Errorf("--etcd-password-file %s: is empty", o.etcdPasswordFile))
		}
	}
	for _, endpoint := range o.etcdEndpoints {
		// With an http endpoint the client would not use TLS at all.
		if encrypted != nil && strings.HasPrefix(endpoint, "http://") {
			errs = append(errs, fmt.Errorf("--etcd-endpoint %s: with --%stls-ca, want https", endpoint, etcdPrefix))
		}
	}
	cfg := store.EtcdConfig{
		Client: clientv3.Config{
			Endpoints: o.etcdEndpoints, Username: o.etcdUser, Password: password, TLS: encrypted,
			DialTimeout: 2 * time.Second, DialKeepAliveTime: 5 * time.Second, DialKeepAliveTimeout: 3 * time.Second,
			Logger: zap.NewNop(), // errors carry the same information
		},
		Prefix: o.etcdPrefix, Lease: o.etcdLease,
	}
	return cfg, errors.Join(append(errs, cfg.Validate())...)
}

// alternate serves as a follower until this process leads, and then as the leader. After a loss of
// leadership alternate serves as a follower again, until ctx ends. The stores other than etcd have no
// followers; a failure of such a store ends alternate.
func alternate(ctx context.Context, opts *options, log *slog.Logger, data store.Store, serve func(context.Context, role) error) error {
	var lost role // the previous role
	for {
		var next role
		var err error
		if opts.store == storeEtcd {
			next, err = candidate(ctx, opts, log, data, lost, serve)
		} else {
			next.term, next.cat, err = data.Lead(ctx, opts.advertise)
		}
		if err != nil || next.term == nil {
			return err
		}
		log.Info("leading", "store", opts.store, obs.KeyVersion, next.cat.Version())
		err = serve(ctx, next)
		if opts.store != storeEtcd || ctx.Err() != nil || !errors.Is(err, controller.ErrNotCommitted) {
			return errors.Join(err, resignAtExit(context.WithoutCancel(ctx), opts, log, next.term))
		}
		log.Warn("lost leadership", obs.KeyError, err)
		lost = next
	}
}

// resignPatience is how long a resignation may take. If the store does not answer in time, the lease
// ends by itself.
const resignPatience = 500 * time.Millisecond

// resign resigns the term within resignPatience.
func resign(ctx context.Context, opts *options, term store.Term) error {
	ctx, cancel := context.WithTimeout(ctx, min(opts.etcdLease, resignPatience))
	defer cancel()
	return term.Resign(ctx)
}

// resignAtExit resigns when the process ends. If etcd does not accept the resignation, resignAtExit
// only logs a warning, as the lease ends by itself. For the other stores resignAtExit returns the
// error: the store's file was not closed.
func resignAtExit(ctx context.Context, opts *options, log *slog.Logger, term store.Term) error {
	err := resign(ctx, opts, term)
	if err == nil || opts.store != storeEtcd {
		return err
	}
	log.Warn("cannot resign; another loaddistributor leads once the lease has ended", "lease", opts.etcdLease, obs.KeyError, err)
	return nil
}

// candidate serves as a follower until it leads. A role without a term means that ctx has ended. In
// parallel candidate resigns a lost term, which takes up to resignPatience if the store does not
// answer.
func candidate(ctx context.Context, opts *options, log *slog.Logger, data store.Store, lost role, serve func(context.Context, role) error) (role, error) {
	followerCtx, stop := context.WithCancel(ctx)
	defer stop()
	var leader atomic.Pointer[string] // written by watchLeader; a stale value costs a detour
	leader.Store(new(string))
	won := make(chan role, 1)
	var background sync.WaitGroup
	background.Go(func() {
		defer stop()
		if lost.term != nil {
			_ = resign(followerCtx, opts, lost.term) // after an error the lease ends by itself
		}
		won <- campaign(followerCtx, opts, log, data)
	})
	background.Go(func() { watchLeader(followerCtx, data, &leader) })
	err := serve(followerCtx, role{store: data, cat: lost.cat, leader: func() string { return *leader.Load() }})
	stop()
	background.Wait()
	next := <-won
	if err != nil && next.term != nil {
		return role{}, errors.Join(err, resignAtExit(context.WithoutCancel(ctx), opts, log, next.term))
	}
	return next, err
}

// campaign tries to lead until it succeeds or ctx ends.
func campaign(ctx context.Context, opts *options, log *slog.Logger, data store.Store) role {
	failing := false
	for {
		term, cat, err := data.Lead(ctx, opts.advertise)
		if err == nil {
			return role{term: term, cat: cat}
		}
		if ctx.Err() != nil {
			return role{}
		}
		if !failing {
			log.Warn("cannot lead through the store; retrying", obs.KeyError, err)
			failing = true
		}
		if !clock.Sleep(ctx, leadPause) {
			return role{}
		}
	}
}

// watchLeader keeps leader up to date.
func watchLeader(ctx context.Context, data store.Store, leader *atomic.Pointer[string]) {
	for {
		limit, cancel := context.WithTimeout(ctx, 2*time.Second)
		if address, err := data.Leader(limit); err == nil {
			leader.Store(&address)
		}
		cancel()
		if !clock.Sleep(ctx, lookPause) {
			return
		}
	}
}
