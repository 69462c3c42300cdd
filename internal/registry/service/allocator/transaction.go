package allocator

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/fairlead/fairlead/internal/alloc"
	"github.com/fairlead/fairlead/internal/svc"
)

// releaseTimeout bounds the releases after a request is answered or has failed;
// what they leave the repair loop finds.
const releaseTimeout = 10 * time.Second

// pools are the pools by resource.
type pools [resources]pool

// Transaction is what one attempt of a write has claimed, and what it releases
// if it succeeds. One of Commit, Revert and Abandon ends it.
type Transaction struct {
	pools    *pools
	log      *slog.Logger
	owner    svc.Name
	claimed  []claim
	releases []claim
}

// Commit releases what the Service no longer has.
func (t *Transaction) Commit(ctx context.Context) { t.release(ctx, t.releases) }

// Revert releases what was claimed.
func (t *Transaction) Revert(ctx context.Context) { t.release(ctx, t.claimed) }

// Abandon keeps the claimed values and the values due for release, for a write that
// failed with err and may still have happened: releasing a name that a Service
// has would give it to a second one. The repair loop frees what no Service has.
func (t *Transaction) Abandon(err error) {
	t.log.Warn("the result of a write of a Service is unknown; keeping its claims until the repair", "service", t.owner.String(), "err", err)
}

// claim claims what the plan requests and assigns it to the Service. After an
// error nothing is claimed.
func (t *Transaction) claim(ctx context.Context, p Plan) error {
	if err := p.checkDuplicates(); err != nil {
		return err
	}
	names, errs := make([]string, len(p.requests)), make([]error, len(p.requests))
	var wg sync.WaitGroup
	for i, r := range p.requests {
		wg.Go(func() { names[i], errs[i] = t.pools[r.resource].claim(ctx, t.owner, r.name) })
	}
	wg.Wait()
	for i, r := range p.requests {
		if errs[i] == nil {
			t.claimed = append(t.claimed, claim{r.resource, names[i]})
		}
	}
	for i, r := range p.requests {
		if errs[i] != nil {
			t.Revert(ctx)
			return r.apiError(errs[i])
		}
	}
	for i, r := range p.requests {
		r.assign(names[i])
	}
	return nil
}

// dryRun assigns what claim could and claims nothing.
func (t *Transaction) dryRun(ctx context.Context, p Plan) error {
	exclude := map[string]bool{}
	for _, r := range p.requests {
		name, err := t.pools[r.resource].dryRun(ctx, r.name, exclude)
		if err != nil {
			return r.apiError(err)
		}
		exclude[name] = true
		r.assign(name)
	}
	return nil
}

// checkDuplicates rejects a plan that requests one port for two purposes.
func (p Plan) checkDuplicates() error {
	requested := map[claim]bool{}
	for _, r := range p.requests {
		if r.name != "" && requested[r.claim] {
			return r.apiError(alloc.ErrPortAllocated)
		}
		requested[r.claim] = true
	}
	return nil
}

// release removes claims, even when the request was cancelled.
func (t *Transaction) release(ctx context.Context, claims []claim) {
	if len(claims) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), releaseTimeout)
	defer cancel()
	var wg sync.WaitGroup
	for _, c := range claims {
		wg.Go(func() {
			if err := t.pools[c.resource].release(ctx, t.owner, c.name); err != nil {
				t.log.Warn("cannot release a claim; the repair loop will", "service", t.owner.String(), "claim", c.name, "err", err)
			}
		})
	}
	wg.Wait()
}
