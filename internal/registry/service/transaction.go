package service

import (
	"context"
	"log/slog"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/alloc"
	"github.com/fairlead/fairlead/internal/svc"
)

// cleanupTimeout bounds the writes after a request is answered or has failed;
// what they leave the repair loop finds.
const cleanupTimeout = 10 * time.Second

// allocator gives out addresses or ports by name.
type allocator interface {
	// claim claims what is asked, or anything, for owner. What is taken or out
	// of range is told by the errors of package alloc.
	claim(ctx context.Context, owner svc.Name, asked string) (string, error)
	// peek answers as claim would, and claims nothing. What is in not counts as
	// taken.
	peek(ctx context.Context, asked string, not map[string]bool) (string, error)
	// release gives up what owner has claimed. Releasing what is not claimed,
	// or claimed by another, does nothing.
	release(ctx context.Context, owner svc.Name, name string) error
}

// allocators are those of this server.
type allocators struct {
	families families
	addrs    *addresses
	ports    *ports
	log      *slog.Logger
}

// transaction is what one attempt of a write has claimed, and what it gives up
// if it succeeds. Exactly one of commit and revert is called, or none when it
// is unknown whether the write happened: then the claims stay, and the repair
// loop frees them if no Service has them.
type transaction struct {
	al       *allocators
	owner    svc.Name
	claimed  []claim
	releases []claim
}

func ownerOf(s *corev1.Service) svc.Name { return svc.Name{Namespace: s.Namespace, Name: s.Name} }

// execute claims what the plan wants and fills it into the Service. After an
// error nothing is claimed. A dry run claims nothing either way.
func (al *allocators) execute(ctx context.Context, s *corev1.Service, p plan, dryRun bool) (*transaction, error) {
	if dryRun {
		return &transaction{al: al}, peekAll(ctx, p)
	}
	if err := twice(p); err != nil {
		return nil, err
	}
	t := &transaction{al: al, owner: ownerOf(s), releases: p.releases}
	got, errs := make([]string, len(p.wants)), make([]error, len(p.wants))
	var g errgroup.Group
	for i, w := range p.wants {
		g.Go(func() error {
			got[i], errs[i] = w.from.claim(ctx, t.owner, w.asked)
			return nil
		})
	}
	_ = g.Wait() // the errors are in errs, in order
	for i, w := range p.wants {
		if errs[i] == nil {
			t.claimed = append(t.claimed, claim{w.from, got[i]})
		}
	}
	for i, w := range p.wants {
		if errs[i] != nil {
			t.revert(ctx)
			return nil, w.refuse(errs[i])
		}
	}
	for i, w := range p.wants {
		w.give(got[i])
	}
	return t, nil
}

// twice refuses a plan that asks for the same port twice.
func twice(p plan) error {
	asked := map[claim]bool{}
	for _, w := range p.wants {
		if w.asked == "" {
			continue
		}
		key := claim{w.from, w.asked}
		if asked[key] {
			return w.refuse(alloc.ErrPortAllocated)
		}
		asked[key] = true
	}
	return nil
}

func peekAll(ctx context.Context, p plan) error {
	not := map[string]bool{}
	for _, w := range p.wants {
		got, err := w.from.peek(ctx, w.asked, not)
		if err != nil {
			return w.refuse(err)
		}
		not[got] = true
		w.give(got)
	}
	return nil
}

func (t *transaction) commit(ctx context.Context) { t.release(ctx, t.releases) }
func (t *transaction) revert(ctx context.Context) { t.release(ctx, t.claimed) }

// release gives up claims, even when the request was cancelled.
func (t *transaction) release(ctx context.Context, claims []claim) {
	if len(claims) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTimeout)
	defer cancel()
	var g errgroup.Group
	for _, c := range claims {
		g.Go(func() error {
			if err := c.from.release(ctx, t.owner, c.name); err != nil {
				t.al.log.Warn("claim not released; the repair loop will do it", "service", t.owner.String(), "claim", c.name, "err", err)
			}
			return nil
		})
	}
	_ = g.Wait() // each error is logged
}
