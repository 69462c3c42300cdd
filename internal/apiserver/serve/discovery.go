package serve

import (
	"context"
	"net/http"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/endpoints/discovery"
	"k8s.io/apiserver/pkg/endpoints/discovery/aggregated"
	"k8s.io/apiserver/pkg/endpoints/handlers/negotiation"
	"k8s.io/apiserver/pkg/endpoints/handlers/responsewriters"
	genericapiserver "k8s.io/apiserver/pkg/server"

	"github.com/fairlead/fairlead/internal/registry"
)

// groupList serves the list of groups at /apis with its apiVersion, which the
// library leaves out for clients of Kubernetes 1.1 and kube-apiserver does not.
type groupList struct{ discovery.GroupManager }

// Groups returns the groups without addresses of servers: only the document at /api has them, as in kube-apiserver, whose
// aggregator leaves them out of each group.
func (l groupList) Groups(ctx context.Context, r *http.Request) ([]metav1.APIGroup, error) {
	groups, err := l.GroupManager.Groups(ctx, r)
	for i := range groups {
		groups[i].ServerAddressByClientCIDRs = nil
	}
	return groups, err
}

// ServeHTTP answers with the list.
func (l groupList) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	groups, err := l.Groups(r.Context(), r)
	if err != nil {
		responsewriters.ErrorNegotiated(err, registry.Codecs, schema.GroupVersion{}, w, r)
		return
	}
	responsewriters.WriteObjectNegotiated(registry.Codecs, negotiation.DefaultEndpointRestrictions, schema.GroupVersion{}, w, r,
		http.StatusOK, &metav1.APIGroupList{Groups: groups}, false)
}

// Groups replaces the list of groups of s by a groupList.
func Groups(s *genericapiserver.GenericAPIServer) {
	container := s.Handler.GoRestfulContainer
	for _, ws := range container.RegisteredWebServices() {
		if ws.RootPath() == genericapiserver.APIGroupPrefix {
			_ = container.Remove(ws) // never fails for a web service that is there
		}
	}
	s.DiscoveryGroupManager = groupList{s.DiscoveryGroupManager}
	wrapped := aggregated.WrapAggregatedDiscoveryToHandler(
		s.DiscoveryGroupManager, s.AggregatedDiscoveryGroupManager, s.PeerAggregatedDiscoveryManager)
	container.Add(wrapped.GenerateWebService(genericapiserver.APIGroupPrefix, metav1.APIGroupList{}))
}
