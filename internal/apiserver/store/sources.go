package store

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/server/v3/etcdserver"
	"go.etcd.io/etcd/server/v3/storage/mvcc"
	"k8s.io/component-base/metrics/legacyregistry"
)

// embeddedSource is the etcd of this process.
type embeddedSource struct{ *etcdserver.EtcdServer }

func (e embeddedSource) changes(ctx context.Context, from, end []byte) (
	revision int64, next func(context.Context) ([]*mvccpb.Event, error), stop func(), err error,
) {
	stream := e.KV().NewWatchStream()
	revision = stream.Rev()
	if _, err := stream.Watch(ctx, 0, from, end, revision+1); err != nil {
		stream.Close()
		return 0, nil, nil, err
	}
	return revision, func(ctx context.Context) ([]*mvccpb.Event, error) {
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case r, ok := <-stream.Chan():
			if !ok || r.CompactRevision != 0 {
				return nil, fmt.Errorf("the changes since revision %d are gone", r.CompactRevision)
			}
			return r.Events, nil
		}
	}, stream.Close, nil
}

func (e embeddedSource) page(ctx context.Context, from, end []byte, revision int64) ([]*mvccpb.KeyValue, error) {
	r, err := e.KV().Range(ctx, from, end, mvcc.RangeOptions{Limit: holdingsPage, Rev: revision})
	if err != nil {
		return nil, err
	}
	return r.KVs, nil
}

func (e embeddedSource) remove(ctx context.Context, keys []string) (n int64, err error) {
	t := &etcdserverpb.TxnRequest{}
	for _, key := range keys {
		t.Success = append(t.Success, &etcdserverpb.RequestOp{Request: &etcdserverpb.RequestOp_RequestDeleteRange{
			RequestDeleteRange: &etcdserverpb.DeleteRangeRequest{Key: []byte(key)}}})
	}
	answer, err := e.Txn(ctx, t)
	if err != nil {
		return 0, err
	}
	for _, r := range answer.Responses {
		n += r.GetResponseDeleteRange().GetDeleted()
	}
	return n, nil
}

// quota is 0: the server has set it.
func (embeddedSource) quota(context.Context) int64 { return 0 }

// leads reports whether this member is the leader.
func (e embeddedSource) leads() bool { return e.Leader() == e.MemberID() }

// externalSource is an etcd elsewhere.
type externalSource struct {
	*clientv3.Client
	endpoints []string
	log       *slog.Logger
}

func (e externalSource) changes(ctx context.Context, from, end []byte) (
	revision int64, next func(context.Context) ([]*mvccpb.Event, error), stop func(), err error,
) {
	first, cancelFirst := context.WithTimeout(ctx, spaceTimeout)
	defer cancelFirst()
	now, err := e.Get(first, string(from), clientv3.WithCountOnly())
	if err != nil {
		return 0, nil, nil, err
	}
	ctx, stop = context.WithCancel(ctx)
	revision = now.Header.Revision
	// Without a leader it ends: a member that is cut off knows of no changes.
	all := e.Watch(clientv3.WithRequireLeader(ctx), string(from), clientv3.WithRange(string(end)), clientv3.WithRev(revision+1))
	return revision, func(ctx context.Context) ([]*mvccpb.Event, error) {
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case r, ok := <-all:
			if !ok {
				return nil, errors.New("the changes have ended")
			}
			out := make([]*mvccpb.Event, 0, len(r.Events))
			for _, one := range r.Events {
				out = append(out, (*mvccpb.Event)(one))
			}
			return out, r.Err()
		}
	}, stop, nil
}

func (e externalSource) page(ctx context.Context, from, end []byte, revision int64) ([]*mvccpb.KeyValue, error) {
	ctx, cancel := context.WithTimeout(ctx, spaceTimeout)
	defer cancel()
	r, err := e.Get(ctx, string(from), clientv3.WithRange(string(end)), clientv3.WithRev(revision), clientv3.WithLimit(holdingsPage))
	if err != nil {
		return nil, err
	}
	return r.Kvs, nil
}

func (e externalSource) remove(ctx context.Context, keys []string) (n int64, err error) {
	all := make([]clientv3.Op, 0, len(keys))
	for _, key := range keys {
		all = append(all, clientv3.OpDelete(key))
	}
	answer, err := e.Txn(ctx).Then(all...).Commit()
	if err != nil {
		return 0, err
	}
	for _, r := range answer.Responses {
		n += r.GetResponseDeleteRange().GetDeleted()
	}
	return n, nil
}

// quota asks the members, one after the other. One of a member that has none is etcd's default.
func (e externalSource) quota(ctx context.Context) int64 {
	var err error
	for _, endpoint := range e.endpoints {
		within, cancel := context.WithTimeout(ctx, quotaTimeout)
		status, failed := e.Status(within, endpoint)
		cancel()
		if failed == nil && status.DbSizeQuota > 0 {
			return status.DbSizeQuota
		}
		if failed == nil {
			return externalQuota
		}
		err = failed
	}
	e.log.Warn("cannot read the quota of etcd; namespaces and Events keep the shares that they have", "err", err)
	return 0
}

// leads is true for each of several servers: they agree which Events are the oldest, and to remove one twice is no error.
func (externalSource) leads() bool { return true }

const (
	// externalQuota is etcd's default quota. It counts where etcd reports none (before 3.6) or has none.
	externalQuota = 2 << 30
	// quotaTimeout bounds the question to one member.
	quotaTimeout = 2 * time.Second
)

// registerRemoved registers the metric that an external etcd has, too.
//
//nolint:gochecknoglobals // a metric
var registerRemoved = sync.OnceFunc(func() { legacyregistry.MustRegister(eventsRemoved) })

// share follows what namespaces take of an external etcd until stop is called, which closes the client.
func share(ctx context.Context, client *clientv3.Client, endpoints []string, prefix string, log *slog.Logger) (h *holdings, stop func()) {
	registerRemoved()
	h = newHoldings(prefix, externalQuota, log)
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	done := make(chan struct{})
	go func() {
		defer close(done)
		h.run(ctx, externalSource{client, endpoints, log})
	}()
	return h, func() {
		cancel()
		<-done
		_ = client.Close()
	}
}
