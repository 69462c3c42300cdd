package traffic

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/fairlead/fairlead/internal/svc"
)

// Bounds of the routes that have series.
const (
	maxRoutes = 1000 // of all Services
	// restPeriod is how often a place for further routes is looked for.
	restPeriod = time.Second
	// routeRest is how long a route must have been silent before it gives its series to another one when there are no more.
	routeRest = 10 * time.Minute
)

// RouteName names a route, or an Ingress.
type RouteName struct {
	Kind string
	svc.Name
}

// Route has the counters of a route of a Service. Its methods are safe for concurrent use, and do nothing for a nil Route.
type Route struct {
	service svc.Name  // empty for the one of all others
	name    RouteName // likewise

	requests [classes]atomic.Uint64
	nanos    atomic.Int64 // of requests that are a matter of one answer
	opened   atomic.Uint64
	last     atomic.Int64 // when it was used, in nanoseconds since 1970
	gone     atomic.Bool  // it has lost its series
}

// Request counts a request of HTTP that has ended, as the one of Service does.
func (r *Route) Request(status int, took time.Duration) {
	if r == nil {
		return
	}
	r.requests[classOf(status)].Add(1)
	r.nanos.Add(int64(max(took, 0)))
}

// Opened counts a connection, or a session of UDP, that the route leads.
func (r *Route) Opened() {
	if r != nil {
		r.opened.Add(1)
	}
}

// use notes that the route is used now, and reports whether it still has its series.
func (r *Route) use(now time.Time) bool {
	r.last.Store(now.UnixNano())
	return !r.gone.Load()
}

// Routes finds the counters of routes by a key of the caller's, such as a rule that does not change. To find one again takes no
// lock, nor do further routes when there is no place.
type Routes struct {
	Service *Service
	known   sync.Map     // *Route by key
	full    atomic.Int64 // until when further routes are counted together without a look for a place, in nanoseconds since 1970
}

// Of returns the counters of the route with a key and a name.
func (o *Routes) Of(key any, name RouteName) *Route {
	now := time.Now()
	if r, ok := o.known.Load(key); ok && r.(*Route).use(now) {
		return r.(*Route)
	}
	r := &o.Service.restRoute
	if now.UnixNano() >= o.full.Load() {
		if r = o.Service.route(name, now); r.name == (RouteName{}) {
			o.full.Store(now.Add(restPeriod).UnixNano())
		} else {
			o.known.Store(key, r)
		}
	}
	r.use(now)
	return r
}

// route returns the counters of a route of the Service, which are made if necessary.
func (s *Service) route(name RouteName, now time.Time) *Route {
	b := s.book
	b.mu.Lock()
	defer b.mu.Unlock()
	if r := s.routes[name]; r != nil {
		return r
	}
	if s.dropped || s.name == (svc.Name{}) || b.routes >= b.most.routes && !b.rest(now) {
		return &s.restRoute
	}
	if s.routes == nil {
		s.routes = map[RouteName]*Route{}
	}
	r := &Route{service: s.name, name: name}
	s.routes[name] = r
	b.routes++
	return r
}

// rest ends the series of the routes that have been silent for routeRest, and reports whether there were any. It looks at all of them,
// at most once a second. The caller holds mu.
func (b *Book) rest(now time.Time) (any bool) {
	if now.Sub(b.rested) < restPeriod {
		return false
	}
	b.rested = now
	for _, s := range b.services {
		for name, r := range s.routes {
			if now.UnixNano()-r.last.Load() >= int64(routeRest) {
				r.gone.Store(true)
				delete(s.routes, name)
				b.routes--
				any = true
			}
		}
	}
	return any
}

// The metrics of routes.
//
//nolint:gochecknoglobals // descriptions
var (
	ofRoute       = []string{"namespace", "service", "kind", "route"}
	routeRequests = prometheus.NewDesc("fairlead_lb_route_requests_total",
		"Requests of HTTP that a route took, by the class of their answers, 'none' without one.", append(ofRoute[:4:4], "class"), nil)
	routeSeconds = prometheus.NewDesc("fairlead_lb_route_request_seconds_total",
		"Time from requests to the end of their answers.", ofRoute, nil)
	routeOpened = prometheus.NewDesc("fairlead_lb_route_connections_total",
		"Connections, and sessions of UDP, that a route led.", ofRoute, nil)
)

// routesOf returns the routes of a Service that have series. The caller holds mu.
func (s *Service) routesOf() (out []*Route) {
	for _, r := range s.routes {
		out = append(out, r)
	}
	if s.restRoute.last.Load() > 0 {
		out = append(out, &s.restRoute)
	}
	return out
}

func (to sink) route(r *Route) {
	kind, name := "", Other
	if r.name != (RouteName{}) {
		kind, name = r.name.Kind, r.name.String()
	}
	of := append(labelsOf(r.service), kind, name)
	if n := r.opened.Load(); n > 0 {
		to.count(routeOpened, float64(n), of...)
	}
	some := false
	for c := range r.requests {
		if n := r.requests[c].Load(); n > 0 {
			some = true
			to.count(routeRequests, float64(n), with(of, class(c))...)
		}
	}
	if some {
		to.count(routeSeconds, time.Duration(r.nanos.Load()).Seconds(), of...)
	}
}
