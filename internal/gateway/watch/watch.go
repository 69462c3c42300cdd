package watch

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"log/slog"
	"maps"
	"reflect"
	"slices"
	"sync"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/gateway"
	"github.com/fairlead/fairlead/internal/gateway/api"
	"github.com/fairlead/fairlead/internal/gateway/basic"
	"github.com/fairlead/fairlead/internal/gateway/fronts"
	"github.com/fairlead/fairlead/internal/gateway/kinds"
	"github.com/fairlead/fairlead/internal/gateway/names"
	"github.com/fairlead/fairlead/internal/gateway/parents"
	"github.com/fairlead/fairlead/internal/gateway/services"
	"github.com/fairlead/fairlead/internal/gateway/trust"
	"github.com/fairlead/fairlead/internal/lb/acme"
	"github.com/fairlead/fairlead/internal/svc"
)

// Options are the options of a Watch.
type Options struct {
	Client  kubernetes.Interface
	Gateway *api.Client
	Log     *slog.Logger
	// Changed is called after an object has changed, without a lock held. It must not block.
	Changed func()
	// Statuses is true for who writes statuses. Otherwise changes of statuses are passed over, and a State has no objects but Policies,
	// and no Touched.
	Statuses bool
}

// Watch keeps fronts. Its methods are safe for concurrent use. Each Follow and Update starts goroutines that end with the
// context, counted by the WaitGroup.
type Watch struct {
	o Options

	mu             sync.Mutex
	started        map[string]bool // kinds that are followed
	pending        int             // of them, not listed yet
	unread         map[string]bool // kinds that may not be read, so they have no objects
	objects        gateway.Objects
	classes        map[string]*gwv1.GatewayClass // ours
	gateways       map[svc.Name]*gwv1.Gateway    // of every class
	ingressClasses map[string]*networkingv1.IngressClass
	ingresses      map[svc.Name]*networkingv1.Ingress // of every class
	secrets        map[svc.Name]*secret
	authorities    map[trust.Ref]*authority
	secretChanges  uint64 // how often one has changed

	// Which Gateways and Ingresses classify has to look at, all of them if a class has changed.
	readGateways, readIngresses           map[svc.Name]bool
	classesChanged, ingressClassesChanged bool
	// What fronts name, by which they are found, and what changed in that since it was followed.
	serviceUsers       referrers
	secretUsers        users[svc.Name]
	authorityUsers     users[trust.Ref]
	changedSecrets     map[svc.Name]bool
	changedAuthorities map[trust.Ref]bool
	copies             copies

	// What was built, and what must be built again.
	fronts   map[svc.Name]*gateway.Front
	versions map[svc.Name]string
	// rebuilt are the fronts without a version, and versioned is secretChanges at the other ones'.
	rebuilt   map[svc.Name]bool
	versioned uint64
	dirty     map[svc.Name]bool
	changed   map[svc.Name]map[kinds.Route]bool // HTTPRoutes and GRPCRoutes, by their Gateways
	// ingressFronts are the fronts of Ingresses, as split divides these, and changedIngresses are the Ingresses to be looked at again.
	ingressFronts    map[svc.Name]*gateway.IngressFront
	split            *fronts.Split
	changedIngresses map[svc.Name]bool
	renewedIngresses map[svc.Name]bool // with another status only
	dirtyIngresses   map[svc.Name]bool // fronts
	// meshed is true if routes with Services as parents are looked for, and meshes, dirtyMesh and dirtyMeshes are for these Services.
	meshed      bool
	meshes      map[svc.Name]*gateway.Mesh
	dirtyMesh   map[svc.Name]bool
	dirtyMeshes bool // all
	// What the next State has as Touched and AllTouched, and what the last one had as NoMeshes.
	touched    map[kinds.Route]bool
	touchedAll bool
	noMeshes   string
}

// New returns a Watch that follows nothing.
func New(o Options) *Watch {
	return &Watch{
		o: o, started: map[string]bool{}, unread: map[string]bool{}, classes: map[string]*gwv1.GatewayClass{},
		gateways:       map[svc.Name]*gwv1.Gateway{},
		ingressClasses: map[string]*networkingv1.IngressClass{}, ingresses: map[svc.Name]*networkingv1.Ingress{},
		secrets: map[svc.Name]*secret{}, authorities: map[trust.Ref]*authority{}, fronts: map[svc.Name]*gateway.Front{},
		versions: map[svc.Name]string{}, rebuilt: map[svc.Name]bool{}, readGateways: map[svc.Name]bool{}, readIngresses: map[svc.Name]bool{},
		serviceUsers: referrers{}, secretUsers: users[svc.Name]{}, authorityUsers: users[trust.Ref]{},
		changedSecrets: map[svc.Name]bool{}, changedAuthorities: map[trust.Ref]bool{}, classesChanged: true, ingressClassesChanged: true,
		ingressFronts: map[svc.Name]*gateway.IngressFront{}, split: fronts.Of(nil),
		changedIngresses: map[svc.Name]bool{}, renewedIngresses: map[svc.Name]bool{}, dirtyIngresses: map[svc.Name]bool{},
		dirty: map[svc.Name]bool{}, changed: map[svc.Name]map[kinds.Route]bool{}, meshes: map[svc.Name]*gateway.Mesh{},
		dirtyMesh: map[svc.Name]bool{}, touched: map[kinds.Route]bool{}, touchedAll: true,
		objects: gateway.Objects{
			Gateways: map[svc.Name]*gwv1.Gateway{}, Routes: map[svc.Name]*gwv1.HTTPRoute{}, Grants: map[svc.Name]*gwv1.ReferenceGrant{},
			Namespaces: map[string]map[string]string{}, Services: map[svc.Name]*services.Service{}, Secrets: map[svc.Name]gateway.Secret{},
			Ingresses: map[svc.Name]*networkingv1.Ingress{}, Secured: map[svc.Name]bool{}, Streams: map[kinds.Route]*kinds.Stream{},
			Sets: map[svc.Name]*gwv1.ListenerSet{}, Calls: map[svc.Name]*gwv1.GRPCRoute{},
			Policies: trust.NewPolicies(), Authorities: map[trust.Ref]string{},
			Meshed: map[svc.Name]map[kinds.Route]bool{}, Named: parents.NewIndex[kinds.Route](),
		},
	}
}

// State is what a Watch has at a moment. It belongs to the caller, what is in it does not change: a map is the one of the State before
// if nothing of it has changed, so the caller must not change it either.
type State struct {
	// Listed is false while a kind has not been read yet: then the rest may lack objects.
	Listed bool
	// FollowsGateways and FollowsIngresses are false before FollowGateways and FollowIngresses: then none is known, whatever exists.
	FollowsGateways, FollowsIngresses bool
	Classes                           []*gwv1.GatewayClass
	// Gateways are ours, with their fronts; Ingresses are ours, and IngressFronts are their fronts, as Split divides these.
	Gateways map[svc.Name]*gwv1.Gateway
	Fronts   map[svc.Name]*gateway.Front
	Routes   map[svc.Name]*gwv1.HTTPRoute
	Calls    map[svc.Name]*gwv1.GRPCRoute
	Streams  map[kinds.Route]*kinds.Stream
	Sets     map[svc.Name]*gwv1.ListenerSet
	Grants   map[svc.Name]*gwv1.ReferenceGrant
	// Orphans are the ListenerSets whose Gateway does not exist.
	Orphans   []*gwv1.ListenerSet
	Ingresses map[svc.Name]*networkingv1.Ingress

	IngressFronts map[svc.Name]*gateway.IngressFront
	Split         *fronts.Split
	// Meshes are for the Services that routes name as parents; nil while BackendTLSPolicies may not be read.
	Meshes map[svc.Name]*gateway.Mesh
	// NoMeshes is why there are no Meshes whatever routes name, "" if that has no reason.
	NoMeshes string
	// Certificates are from the Secrets that can be used.
	Certificates map[svc.Name]*tls.Certificate
	// Users are from the Secrets with names and passwords.
	Users map[basic.Source]*basic.Users
	// Answers are the ones to challenges of ACME that Secrets have while a certificate is ordered.
	Answers map[svc.Name]acme.Answers
	// Authorities are from the objects that can be used.
	Authorities map[trust.Ref][]*x509.Certificate
	Policies    map[svc.Name]*gwv1.BackendTLSPolicy
	// Touched are the routes that are not as in the last State that was listed, or whose fronts and Meshes are not; with AllTouched it
	// may be any. Routes that have been deleted are among them.
	Touched    map[kinds.Route]bool
	AllTouched bool
	// Versions differ if the listeners of a Gateway do, or what they identify themselves with, and do not depend on routes. Whoever has the
	// same objects has the same ones: nodes report which they serve.
	Versions map[svc.Name]string
}

// Update follows what has become necessary, builds the fronts whose objects have changed, and returns the state.
func (w *Watch) Update(ctx context.Context, running *sync.WaitGroup) *State {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.classify()
	w.followMore(ctx, running)
	s := &State{Listed: w.pending == 0}
	if !s.Listed {
		return s
	}
	s.FollowsGateways, s.FollowsIngresses = w.started["gateways"], w.started["ingresses"]
	w.build()
	if !w.started[grantKind] {
		for _, f := range w.ingressFronts {
			if f.Granted() {
				w.followGrants(ctx, running, true)
				break
			}
		}
	}
	w.followSecrets(ctx, running)
	w.followAuthorities(ctx, running)
	s.Listed = w.pending == 0
	s.Fronts, s.Versions = copyOf(w.fronts, &w.copies.fronts), w.updateVersions()
	s.IngressFronts, s.Split = copyOf(w.ingressFronts, &w.copies.ingressFronts), w.split
	if w.copies.policies == nil {
		w.copies.policies = w.objects.Policies.All()
	}
	s.Authorities, s.Policies = w.trusted(), w.copies.policies
	if w.o.Statuses {
		w.copyTo(s)
	}
	if w.unread[policyKind] {
		s.NoMeshes = "it may not read BackendTLSPolicies: give it the rights get, list and watch"
	} else {
		s.Meshes = copyOf(w.meshes, &w.copies.meshes)
	}
	copySecretsTo(w, s)
	if w.touchedAll = w.touchedAll || s.NoMeshes != w.noMeshes; s.Listed && w.o.Statuses {
		s.Touched, s.AllTouched, w.noMeshes = w.touched, w.touchedAll, s.NoMeshes
		w.touched, w.touchedAll = map[kinds.Route]bool{}, false
	}
	return s
}

// copySecretsTo copies what Secrets have to a state. The caller holds mu.
func copySecretsTo(w *Watch, s *State) {
	last := &w.copies
	if last.certificates == nil || last.secrets != w.secretChanges {
		last.secrets, last.certificates = w.secretChanges, map[svc.Name]*tls.Certificate{}
		last.users, last.answers = map[basic.Source]*basic.Users{}, map[svc.Name]acme.Answers{}
		for n, t := range w.secrets {
			if t.cert != nil {
				last.certificates[n] = t.cert
			}
			maps.Copy(last.users, t.users)
			if !t.answers.Empty() {
				last.answers[n] = t.answers
			}
		}
	}
	s.Certificates, s.Users, s.Answers = last.certificates, last.users, last.answers
}

// copyTo copies the objects that have statuses to a state, and the ReferenceGrants. The caller holds mu.
func (w *Watch) copyTo(s *State) {
	s.Classes = slices.SortedFunc(maps.Values(w.classes), func(a, b *gwv1.GatewayClass) int {
		return svc.NameOf(a).Compare(svc.NameOf(b))
	})
	o, last := &w.objects, &w.copies
	s.Gateways, s.Routes = copyOf(o.Gateways, &last.gateways), copyOf(o.Routes, &last.routes)
	s.Ingresses = copyOf(o.Ingresses, &last.ingresses)
	s.Calls, s.Streams, s.Sets = copyOf(o.Calls, &last.calls), copyOf(o.Streams, &last.streams), copyOf(o.Sets, &last.sets)
	s.Grants = copyOf(o.Grants, &last.grants)
	for _, set := range s.Sets {
		if n := parents.OfSet(set); n != (svc.Name{}) && w.gateways[n] == nil {
			s.Orphans = append(s.Orphans, set)
		}
	}
}

// classify finds out which Gateways and Ingresses are ours, of the ones that have changed, or of all if a class has.
func (w *Watch) classify() {
	if w.classesChanged {
		for n := range w.gateways {
			w.readGateways[n] = true
		}
	}
	for n := range w.readGateways {
		classifyGateway(w, n, w.gateways[n])
	}
	if w.ingressClassesChanged {
		for n := range w.ingresses {
			w.readIngresses[n] = true
		}
	}
	if len(w.readIngresses) > 0 {
		byDefault := names.DefaultClass(maps.Values(w.ingressClasses))
		for n := range w.readIngresses {
			classifyIngress(w, n, w.ingresses[n], byDefault)
		}
	}
	clear(w.readGateways)
	clear(w.readIngresses)
	w.classesChanged, w.ingressClassesChanged = false, false
}

// classifyGateway takes a Gateway over if it is ours. nil has gone.
func classifyGateway(w *Watch, n svc.Name, g *gwv1.Gateway) {
	ours := g != nil && w.classes[string(g.Spec.GatewayClassName)] != nil
	if have := w.objects.Gateways[n]; ours && have != g {
		w.objects.Gateways[n], w.copies.gateways = g, nil
		if have == nil || !sameSpec(have, g, specOfGateway) {
			w.dirty[n] = true
		}
	} else if !ours && have != nil {
		w.forget(n)
	}
}

// classifyIngress takes an Ingress over if it is ours. nil has gone.
func classifyIngress(w *Watch, n svc.Name, in *networkingv1.Ingress, byDefault string) {
	ours, secured := false, false
	if in != nil {
		if c := w.ingressClasses[names.ClassOf(in, byDefault)]; c != nil {
			ours, secured = names.OurIngressClass(c)
		}
	}
	if w.objects.Secured[n] != secured {
		w.changedIngresses[n] = true
		if delete(w.objects.Secured, n); secured {
			w.objects.Secured[n] = true
		}
	}
	if have := w.objects.Ingresses[n]; ours && have != in {
		w.objects.Ingresses[n], w.copies.ingresses = in, nil
		if have == nil || !sameSpec(have, in, specOfIngress) || !maps.Equal(have.Annotations, in.Annotations) {
			w.changedIngresses[n] = true
		} else {
			w.renewedIngresses[n] = true
		}
	} else if !ours && have != nil {
		delete(w.objects.Ingresses, n)
		w.copies.ingresses = nil
		w.changedIngresses[n] = true
	}
}

// setGateway takes a Gateway of any class over, nil if it has gone. The caller holds mu.
func setGateway(w *Watch, n svc.Name, g *gwv1.Gateway) bool {
	w.readGateways[n] = true
	return set(w.gateways, n, g)
}

// setIngress takes an Ingress of any class over, nil if it has gone. The caller holds mu.
func setIngress(w *Watch, n svc.Name, in *networkingv1.Ingress) bool {
	w.readIngresses[n] = true
	return set(w.ingresses, n, in)
}

// touch puts routes into what the next State has as Touched.
func (w *Watch) touch(routes ...kinds.Route) {
	for _, r := range routes {
		if w.o.Statuses { // otherwise nobody takes them
			w.touched[r] = true
		}
	}
}

// forget forgets a Gateway that is not ours any more.
func (w *Watch) forget(n svc.Name) {
	delete(w.objects.Gateways, n)
	w.copies.gateways = nil
	before := w.fronts[n]
	delete(w.fronts, n)
	built(w, n, before, nil)
	w.touchedAll = true
}

// build builds the fronts whose objects have changed.
func (w *Watch) build() {
	one := func(n svc.Name) {
		before := w.fronts[n]
		switch {
		case w.objects.Gateways[n] == nil:
			return
		case w.dirty[n] || before == nil:
			w.fronts[n] = gateway.BuildGateway(&w.objects, n, before)
		default:
			w.fronts[n] = gateway.ChangeGateway(&w.objects, n, before, w.changed[n])
		}
		built(w, n, before, w.fronts[n])
		changed := w.fronts[n].Changed
		w.touch(slices.Collect(maps.Keys(changed))...)
		w.touchedAll = w.touchedAll || changed == nil
	}
	for n := range w.dirty {
		one(n)
	}
	for n := range w.changed {
		if !w.dirty[n] {
			one(n)
		}
	}
	w.buildIngresses()
	w.buildMeshes()
	clear(w.dirty)
	clear(w.changed)
	w.dirtyMeshes = false
}

// change marks HTTPRoutes and GRPCRoutes of a Gateway as changed. Its listeners and its routes of connections are built again in any
// case. The caller holds mu.
func change(w *Watch, g svc.Name, routes ...kinds.Route) {
	if w.changed[g] == nil {
		w.changed[g] = map[kinds.Route]bool{}
	}
	for _, r := range routes {
		w.changed[g][r] = true
	}
}

// changeBeside is change, and marks the routes of connections of the Gateway, too: their statuses may differ.
func changeBeside(w *Watch, g svc.Name, routes ...kinds.Route) {
	change(w, g, routes...)
	if !w.o.Statuses {
		return
	}
	for key := range w.objects.Named.Routes(g) {
		if w.objects.Streams[key] != nil {
			w.touch(key)
		}
	}
}

// setRoute takes an HTTPRoute over, nil if it has gone.
func (w *Watch) setRoute(n svc.Name, r *gwv1.HTTPRoute) bool {
	if !w.o.Statuses && r != nil {
		r.Status = gwv1.HTTPRouteStatus{}
	}
	key := kinds.Route{Kind: kinds.HTTPRoute, Name: n}
	return replace(w, w.objects.Routes, key, r, specOfRoute, func(s *gwv1.HTTPRouteSpec) *gwv1.CommonRouteSpec {
		return &s.CommonRouteSpec
	})
}

// setCall takes a GRPCRoute over, nil if it has gone.
func (w *Watch) setCall(n svc.Name, r *gwv1.GRPCRoute) bool {
	if !w.o.Statuses && r != nil {
		r.Status = gwv1.GRPCRouteStatus{}
	}
	key := kinds.Route{Kind: kinds.GRPCRoute, Name: n}
	return replace(w, w.objects.Calls, key, r, specOfCall, func(s *gwv1.GRPCRouteSpec) *gwv1.CommonRouteSpec {
		return &s.CommonRouteSpec
	})
}

// replace takes a route over, nil if it has gone. The Gateways and Services that it names, or has named before, are built again.
func replace[T, S any, P interface {
	*T
	metav1.Object
}](w *Watch, all map[svc.Name]*T, key kinds.Route, r P, spec func(P) *S, common func(*S) *gwv1.CommonRouteSpec) bool {
	have := P(all[key.Name])
	if same := sameSpec(have, r, spec); same && !w.o.Statuses {
		return false
	} else if same {
		*spec(r) = *spec(have) // one copy in memory, and to compare the two again costs little
	} else {
		var named [2][]gwv1.ParentReference
		for i, o := range []P{have, r} {
			if o == nil {
				continue
			}
			refs := common(spec(o)).ParentRefs
			named[i] = refs
			for _, g := range parents.Gateways(w.objects.Sets, key.Namespace, refs) {
				change(w, g, key)
			}
			for _, s := range parents.Services(key.Namespace, refs) {
				w.setMeshed(s, key, o == r)
			}
		}
		w.objects.Named.SetRoute(key, key.Namespace, named[0], named[1])
	}
	if w.touch(key); key.Kind == kinds.HTTPRoute {
		w.copies.routes = nil
	} else {
		w.copies.calls = nil
	}
	return set(all, key.Name, (*T)(r))
}

// sameSpec reports whether only the status or the metadata of an object has changed, of which fronts only depend on two annotations. Its
// generation does not tell all: after the definition of its kind is replaced the same object is read with other fields.
func sameSpec[T, S any, P interface {
	*T
	metav1.Object
}](a, b P, spec func(P) *S) bool {
	return a != nil && b != nil && a.GetUID() == b.GetUID() && a.GetGeneration() == b.GetGeneration() &&
		a.GetAnnotations()[dialect.ACME] == b.GetAnnotations()[dialect.ACME] &&
		a.GetAnnotations()[svc.MaintenanceAnnotation] == b.GetAnnotations()[svc.MaintenanceAnnotation] && reflect.DeepEqual(spec(a), spec(b))
}

func specOfRoute(r *gwv1.HTTPRoute) *gwv1.HTTPRouteSpec { return &r.Spec }

func specOfCall(r *gwv1.GRPCRoute) *gwv1.GRPCRouteSpec { return &r.Spec }

func specOfGateway(g *gwv1.Gateway) *gwv1.GatewaySpec { return &g.Spec }

func specOfIngress(in *networkingv1.Ingress) *networkingv1.IngressSpec { return &in.Spec }

func specOfSet(s *gwv1.ListenerSet) *gwv1.ListenerSetSpec { return &s.Spec }

// setService takes over what routes ask of a Service, nil if it has gone.
func (w *Watch) setService(n svc.Name, s *corev1.Service) bool {
	have := w.objects.Services[n]
	if s == nil {
		delete(w.objects.Services, n)
		if have == nil {
			return false
		}
	} else {
		next := services.Of(s)
		if have != nil && have.Equal(next) {
			return false
		}
		w.objects.Services[n] = next
	}
	for g := range w.serviceUsers[n] {
		changeBeside(w, g, w.fronts[g].Users.Of(n)...)
	}
	for s, m := range w.meshes {
		if m.Refers(n) {
			w.dirtyMesh[s] = true
		}
	}
	for g, f := range w.ingressFronts {
		if f.Refers(n) {
			w.dirtyIngresses[g] = true
		}
	}
	return true
}
