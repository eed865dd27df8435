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

// Pauses of a follower, between two attempts to lead while the store does not
// answer, and between two looks at who leads.
const (
	leadPause = 500 * time.Millisecond
	lookPause = 500 * time.Millisecond
)

// role is what a process serves as: the leader, which has a term, or a follower
// of the store.
type role struct {
	term   store.Term
	cat    *catalog.Catalog // of a follower: what it knew when it led; nil: it has not led
	follow store.Store
	leader func() string // of a follower: who leads
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

// etcdConfig reads the files of what etcd is shown, and returns everything that
// is wrong.
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
		// The client would speak in clear, whatever else is configured.
		if encrypted != nil && strings.HasPrefix(endpoint, "http://") {
			errs = append(errs, fmt.Errorf("--etcd-endpoint %s: with --%stls-ca, want https", endpoint, etcdPrefix))
		}
	}
	cfg := store.EtcdConfig{
		Client: clientv3.Config{
			Endpoints: o.etcdEndpoints, Username: o.etcdUser, Password: password, TLS: encrypted,
			DialTimeout: 2 * time.Second, DialKeepAliveTime: 5 * time.Second, DialKeepAliveTimeout: 3 * time.Second,
			Logger: zap.NewNop(), // what it would say, errors say
		},
		Prefix: o.etcdPrefix, Lease: o.etcdLease,
	}
	return cfg, errors.Join(append(errs, cfg.Validate())...)
}

// alternate serves as a follower until this process leads, then as the leader,
// and when it has lost that as a follower again, until ctx ends. A store of one
// process has no followers, and its failure is the end.
func alternate(ctx context.Context, opts *options, log *slog.Logger, data store.Store, serve func(context.Context, role) error) error {
	var lost role // the one before
	for {
		var as role
		var err error
		if opts.store == storeEtcd {
			as, err = candidate(ctx, opts, log, data, lost, serve)
		} else {
			as.term, as.cat, err = data.Lead(ctx, opts.advertise)
		}
		if err != nil || as.term == nil {
			return err
		}
		log.Info("leading", "store", opts.store, obs.KeyVersion, as.cat.Version())
		err = serve(ctx, as)
		if opts.store != storeEtcd || ctx.Err() != nil || !errors.Is(err, controller.ErrNotCommitted) {
			return errors.Join(err, leave(context.WithoutCancel(ctx), opts, log, as.term))
		}
		log.Warn("lost leadership", obs.KeyError, err)
		lost = as
	}
}

// resignPatience is how long a process that ends waits for the store; its lease ends by itself.
const resignPatience = 500 * time.Millisecond

// resign takes at most resignPatience.
func resign(ctx context.Context, opts *options, term store.Term) error {
	ctx, cancel := context.WithTimeout(ctx, min(opts.etcdLease, resignPatience))
	defer cancel()
	return term.Resign(ctx)
}

// leave resigns where the process ends. If etcd does not take the resignation, leave only warns:
// the lease ends by itself. The error of another store says that its file was not closed.
func leave(ctx context.Context, opts *options, log *slog.Logger, term store.Term) error {
	err := resign(ctx, opts, term)
	if err == nil || opts.store != storeEtcd {
		return err
	}
	log.Warn("cannot resign; another loaddistributor leads once the lease has ended", "lease", opts.etcdLease, obs.KeyError, err)
	return nil
}

// candidate follows until it leads. A role without a term means that ctx has
// ended. A term that is lost is resigned meanwhile: with a store that does not answer
// that takes as long as it may.
func candidate(ctx context.Context, opts *options, log *slog.Logger, data store.Store, lost role, serve func(context.Context, role) error) (role, error) {
	following, stop := context.WithCancel(ctx)
	defer stop()
	var leader atomic.Pointer[string] // written by look; a stale one costs a detour
	leader.Store(new(string))
	won := make(chan role, 1)
	var others sync.WaitGroup
	others.Go(func() {
		defer stop()
		if lost.term != nil {
			_ = resign(following, opts, lost.term) // or its lease ends
		}
		won <- campaign(following, opts, log, data)
	})
	others.Go(func() { look(following, data, &leader) })
	err := serve(following, role{follow: data, cat: lost.cat, leader: func() string { return *leader.Load() }})
	stop()
	others.Wait()
	as := <-won
	if err != nil && as.term != nil {
		return role{}, errors.Join(err, leave(context.WithoutCancel(ctx), opts, log, as.term))
	}
	return as, err
}

// campaign tries to lead until it does or ctx ends.
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

// look keeps up with who leads.
func look(ctx context.Context, data store.Store, leader *atomic.Pointer[string]) {
	for {
		limit, cancel := context.WithTimeout(ctx, 2*time.Second)
		if who, err := data.Leader(limit); err == nil {
			leader.Store(&who)
		}
		cancel()
		if !clock.Sleep(ctx, lookPause) {
			return
		}
	}
}
