package ui

import (
	"context"
	"fmt"
	"net/url"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/cli/base"
)

const (
	// connectionsKept is shorter than the time after which a page asks again.
	connectionsKept = 8 * time.Second
	// maxKept bounds the answers that are kept, each of which may have some MB.
	maxKept = 32
)

// kept remembers answers for a while, so that many pages of a user cost as much as one. Users do not share answers, because their rights
// differ.
type kept struct {
	mu sync.Mutex
	of map[string]*keptAnswer
	// spill has a question answered without keeping the answer where there is no place for it. Else it is refused.
	spill bool
}

// keptAnswer is read when done is closed.
type keptAnswer struct {
	done  chan struct{}
	at    time.Time     // when the answer came; zero until then
	keep  time.Duration // for how long it counts
	value any
	err   error
}

// keyOf names a question of a user.
func keyOf(path string, user *rest.ImpersonationConfig, params url.Values) string {
	return fmt.Sprintf("%q %q %q %q %s?%s", user.UserName, user.UID, user.Groups, user.Extra, path, params.Encode())
}

// get returns a kept answer, or asks. A request during the question waits for the same answer. An error is not kept.
func (k *kept) get(ctx context.Context, key string, keep time.Duration, ask func(context.Context) (any, error)) (any, error) {
	k.mu.Lock()
	for other, a := range k.of {
		if !a.at.IsZero() && time.Since(a.at) > a.keep {
			delete(k.of, other)
		}
	}
	a := k.of[key]
	if a == nil {
		if len(k.of) >= maxKept && !k.forgetOldest() {
			k.mu.Unlock()
			if k.spill {
				return ask(ctx)
			}
			return nil, errors.NewTooManyRequests(fmt.Sprintf("%d such questions are being answered: ask again", maxKept), 1)
		}
		a = &keptAnswer{done: make(chan struct{}), keep: keep}
		k.of[key] = a
		k.mu.Unlock()
		k.fill(ctx, key, a, ask)
		return a.value, a.err
	}
	k.mu.Unlock()
	select {
	case <-a.done:
		return a.value, a.err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// forgetOldest reports whether there was an answer to forget. The caller holds mu.
func (k *kept) forgetOldest() bool {
	oldest := ""
	for key, a := range k.of {
		if !a.at.IsZero() && (oldest == "" || a.at.Before(k.of[oldest].at)) {
			oldest = key
		}
	}
	delete(k.of, oldest)
	return oldest != ""
}

// fill asks, for all who wait, even if the first of them leaves.
func (k *kept) fill(ctx context.Context, key string, a *keptAnswer, ask func(context.Context) (any, error)) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), base.RequestTimeout)
	defer cancel()
	a.err = context.Canceled // until there is another outcome
	defer func() {
		k.mu.Lock()
		defer k.mu.Unlock()
		if a.at = time.Now(); a.err != nil {
			delete(k.of, key)
		}
		close(a.done)
	}()
	a.value, a.err = ask(ctx)
}
