package watch

import (
	"cmp"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/legacyregistry"
)

const (
	// DefaultMaxWatches is how many watches a user may have at a time unless configured.
	DefaultMaxWatches = 2000
	// userUnread and allUnread are how many bytes may wait for the clients of one user, and of all users.
	userUnread, allUnread = 32 << 20, 256 << 20
	// unreadGrace is how long a client may read nothing while too many bytes wait.
	unreadGrace = time.Second
	// unreadBusy is how long a client has read nothing when its user gets no further watch.
	unreadBusy = 100 * time.Millisecond
	// refusedWait is after how many seconds a client that got no watch may ask again.
	refusedWait = 5
)

// refusedWatches counts the watches that users did not get.
var refusedWatches = sync.OnceValue(func() *metrics.CounterVec { //nolint:gochecknoglobals // the registry is global, too
	c := metrics.NewCounterVec(&metrics.CounterOpts{
		Name: "fairlead_apiserver_watches_refused_total", StabilityLevel: metrics.ALPHA,
		Help: "Watches that were refused because their user had too many, or did not read those it had.",
	}, []string{"reason"})
	legacyregistry.MustRegister(c)
	return c
})

// Budget bounds the watches of each user in number, and in the bytes that they do not read: an event is encoded for each
// watch and waits until the client takes it. Where too many bytes wait, the watches end whose clients have not read for
// the longest time.
type Budget struct {
	watches         int
	perUser, common int64

	mu    sync.Mutex
	users map[string]*userWatches
	bytes int64
	look  bool // a look at what waits is due
}

// userWatches is what a user has.
type userWatches struct {
	name    string
	watches int
	bytes   int64 // that wait
	waiting map[*stallGuard]int64
}

// NewBudget returns a budget in which each user may have that many watches. Members of system:masters, and the server
// itself, may have any number.
func NewBudget(watches int) *Budget {
	return &Budget{watches: watches, perUser: userUnread, common: allUnread, users: map[string]*userWatches{}}
}

// open counts a watch of u until done is called, or returns why u may not have it.
func (b *Budget) open(u user.Info, g *stallGuard) (done func(), err error) {
	name, limited := "", true
	if u != nil {
		name = u.GetName()
		limited = name != user.APIServerUser && !slices.Contains(u.GetGroups(), user.SystemPrivilegedGroup)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	w := b.users[name]
	if w == nil {
		w = &userWatches{name: name, waiting: map[*stallGuard]int64{}}
		b.users[name] = w
	}
	switch {
	case limited && w.watches >= b.watches:
		refusedWatches().WithLabelValues("number").Inc()
		return nil, apierrors.NewTooManyRequests(fmt.Sprintf("user %q has %d watches, and may not have more; close some, or ask an "+
			"administrator to raise --max-watches-per-user", name, w.watches), refusedWait)
	case limited && w.bytes > b.perUser && w.idle() > unreadBusy:
		refusedWatches().WithLabelValues("unread").Inc()
		return nil, apierrors.NewTooManyRequests(fmt.Sprintf("the watches of user %q have %d MiB to read; read them, or close them", name,
			w.bytes>>20), refusedWait)
	}
	w.watches++
	g.budget, g.owner = b, w
	return func() { b.close(w) }, nil
}

// close forgets a watch.
func (b *Budget) close(w *userWatches) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if w.watches--; w.watches == 0 {
		delete(b.users, w.name)
	}
}

// idle returns the longest time that a client of w has not read. The caller holds the lock of the budget.
func (w *userWatches) idle() (longest time.Duration) {
	for g := range w.waiting {
		longest = max(longest, g.idle())
	}
	return longest
}

// add counts bytes that wait for the client of g, or less of them where n is negative.
func (b *Budget) add(g *stallGuard, n int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	w := g.owner
	w.bytes, b.bytes = w.bytes+n, b.bytes+n
	if w.waiting[g] += n; w.waiting[g] == 0 {
		delete(w.waiting, g)
	}
	if n > 0 && !b.look && (w.bytes > b.perUser || b.bytes > b.common) {
		b.look = true
		time.AfterFunc(unreadGrace, b.enforce)
	}
}

// enforce ends watches until what waits is within the budget.
func (b *Budget) enforce() {
	b.mu.Lock()
	var cut []*stallGuard
	over := false
	for _, w := range b.users {
		c, more := surplus(w.waiting, w.bytes-b.perUser)
		cut, over = append(cut, c...), over || more
	}
	ended := sets.New(cut...)
	left, bytes := map[*stallGuard]int64{}, int64(0)
	for _, w := range b.users {
		for g, n := range w.waiting {
			if !ended.Has(g) {
				left[g] = n
				bytes += n
			}
		}
	}
	c, more := surplus(left, bytes-b.common)
	cut, over = append(cut, c...), over || more
	if b.look = over; over {
		time.AfterFunc(unreadGrace, b.enforce)
	}
	b.mu.Unlock()
	for _, g := range cut {
		g.cut()
	}
}

// surplus returns which of waiting to end so that excess bytes go: the ones whose clients have not read for longest, and for
// unreadGrace at least. over reports whether that is not enough.
func surplus(waiting map[*stallGuard]int64, excess int64) (cut []*stallGuard, over bool) {
	if excess <= 0 {
		return nil, false
	}
	idle := map[*stallGuard]time.Duration{}
	for g := range waiting {
		if d := g.idle(); d >= unreadGrace {
			idle[g] = d
			cut = append(cut, g)
		}
	}
	slices.SortFunc(cut, func(a, b *stallGuard) int { return cmp.Compare(idle[b], idle[a]) })
	for i, g := range cut {
		if excess -= waiting[g]; excess <= 0 {
			return cut[:i+1], false
		}
	}
	return cut, true
}

// Bounded returns next with its watches counted in b. refuse answers a request with an error.
func (b *Budget) Bounded(next http.Handler, refuse func(http.ResponseWriter, *http.Request, error)) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if g, ok := r.Context().Value(guardKey{}).(*stallGuard); ok {
			u, _ := request.UserFrom(r.Context())
			done, err := b.open(u, g)
			if err != nil {
				refuse(w, r, err)
				return
			}
			defer done()
		}
		next.ServeHTTP(w, r)
	})
}
