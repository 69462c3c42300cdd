package custom

import (
	"net/http"
	"sync"
	"time"

	extensionsserver "k8s.io/apiextensions-apiserver/pkg/apiserver"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	apirequest "k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/registry/generic"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/storagebackend"
	"k8s.io/apiserver/pkg/storage/storagebackend/factory"

	"github.com/fairlead/fairlead/internal/apiserver/backend"
)

// ruleFree are the verbs for which the library evaluates no rule.
var ruleFree = map[string]bool{"get": true, "list": true, "watch": true, "delete": true, "deletecollection": true}

// reads serves the verbs of ruleFree, for kinds with rules (x-kubernetes-validations), with a second handler of the library.
// That one sees the definitions without their rules, and has the watch caches of the kinds. The first handler compiles all rules of
// a kind before it answers anything, which is most of its cost; now it does so for kinds that are written. All kinds of the
// Gateway API are watched from the start, and few clusters have objects of more than some.
type reads struct {
	known *ruleless
	light http.Handler
	all   http.Handler
}

// separateReads has s, made from config, serve as described at reads. known has the definitions of s.
func separateReads(
	s *extensionsserver.CustomResourceDefinitions, config *extensionsserver.Config, known *ruleless, back *backend.Backend,
) error {
	handler, stores, c := s.GenericAPIServer.Handler, &cachedStores{customBackEnd: customBackEnd{back}}, config.GenericConfig
	// The first handler has the groups, the owners of fields and the establishing, and gets what the second does not serve.
	light, err := extensionsserver.NewCustomResourceDefinitionHandler(nil, nil, known, handler.Director, stores, c.AdmissionControl,
		nil, config.ExtraConfig.ServiceResolver, config.ExtraConfig.AuthResolverWrapper, config.ExtraConfig.MasterCount,
		s.GenericAPIServer.Authorizer, c.RequestTimeout, time.Duration(c.MinRequestTimeout)*time.Second, nil, c.MaxRequestBodyBytes)
	if err != nil {
		return err
	}
	s.GenericAPIServer.RegisterDestroyFunc(stores.destroy)
	handler.Director = &reads{known, light, handler.Director}
	return nil
}

// ServeHTTP answers a request.
func (h *reads) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	info, ok := apirequest.RequestInfoFrom(r.Context())
	if ok && info.IsResourceRequest && ruleFree[info.Verb] &&
		h.known.has(schema.GroupResource{Group: info.APIGroup, Resource: info.Resource}) {
		h.light.ServeHTTP(w, r)
		return
	}
	h.all.ServeHTTP(w, r)
}

// changingBackEnd are the options of the first handler: without a watch cache where the second has it.
type changingBackEnd struct {
	customBackEnd
	known *ruleless
}

// GetRESTOptions returns the options of one resource.
func (b changingBackEnd) GetRESTOptions(gr schema.GroupResource, example runtime.Object) (generic.RESTOptions, error) {
	o, err := b.customBackEnd.GetRESTOptions(gr, example)
	if err == nil && b.known.has(gr) {
		b.Uncache(&o)
	}
	return o, err
}

// cachedStores are the options of the second handler. They remember its storages, which the library destroys with a definition,
// but at the end of the server only for a handler of its making.
type cachedStores struct {
	customBackEnd

	mu       sync.Mutex
	over     bool
	nextID   int
	destroys map[int]func()
}

// GetRESTOptions returns the options of one resource.
func (b *cachedStores) GetRESTOptions(gr schema.GroupResource, example runtime.Object) (generic.RESTOptions, error) {
	o, err := b.customBackEnd.GetRESTOptions(gr, example)
	o.Decorator = backend.Wrap(o.Decorator, func(_ *storagebackend.ConfigForResource, s storage.Interface, destroy factory.DestroyFunc,
	) (storage.Interface, factory.DestroyFunc) {
		return s, b.remember(destroy)
	})
	return o, err
}

// remember returns destroy, which is also called at the end of the server.
func (b *cachedStores) remember(destroy func()) func() {
	once := sync.OnceFunc(destroy)
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.over {
		defer once()
		return once
	}
	id := b.nextID
	b.nextID++
	if b.destroys == nil {
		b.destroys = map[int]func(){}
	}
	b.destroys[id] = once
	return func() {
		once()
		b.mu.Lock()
		defer b.mu.Unlock()
		delete(b.destroys, id)
	}
}

// destroy ends all storages.
func (b *cachedStores) destroy() {
	b.mu.Lock()
	all := b.destroys
	b.over, b.destroys = true, nil
	b.mu.Unlock()
	for _, f := range all {
		f()
	}
}
