package serve

import (
	"fmt"
	"net/http"

	"github.com/emicklei/go-restful/v3"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/endpoints/handlers/responsewriters"
	"k8s.io/apiserver/pkg/endpoints/request"
	genericapiserver "k8s.io/apiserver/pkg/server"

	"github.com/fairlead/fairlead/internal/registry"
)

// unserved are the resources of Kubernetes that fairlead does not serve, by their groups (docs/compatibility.md).
var unserved = map[string][]string{
	"":                       {"limitranges", "persistentvolumes", "persistentvolumeclaims", "replicationcontrollers", "podtemplates"},
	"apps":                   {"statefulsets"},
	"batch":                  {"jobs", "cronjobs"},
	"autoscaling":            {"horizontalpodautoscalers"},
	"scheduling.k8s.io":      {"priorityclasses"},
	"networking.k8s.io":      {"networkpolicies"},
	"storage.k8s.io":         {"storageclasses", "volumeattachments", "csidrivers", "csinodes", "csistoragecapacities"},
	"node.k8s.io":            {"runtimeclasses"},
	"resource.k8s.io":        {"resourceclaims", "resourceclaimtemplates", "resourceslices", "deviceclasses"},
	"apiregistration.k8s.io": {"apiservices"},
}

// notServed returns the error for a request for a resource that is not served and that people know from Kubernetes; nil for
// others.
func notServed(r *http.Request) *apierrors.StatusError {
	info, ok := request.RequestInfoFrom(r.Context())
	if !ok || !info.IsResourceRequest {
		return nil
	}
	for _, resource := range unserved[info.APIGroup] {
		if resource != info.Resource {
			continue
		}
		name := schema.GroupResource{Group: info.APIGroup, Resource: resource}
		return &apierrors.StatusError{ErrStatus: metav1.Status{
			Status: metav1.StatusFailure, Code: http.StatusNotFound, Reason: metav1.StatusReasonNotFound,
			Message: fmt.Sprintf("fairlead does not serve %s: docs/compatibility.md says what it serves", name),
			Details: &metav1.StatusDetails{Group: info.APIGroup, Kind: resource},
		}}
	}
	return nil
}

// NameUnserved returns a handler that answers requests for unserved kinds, and has next answer the rest.
func NameUnserved(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if err := notServed(r); err != nil {
			answerError(err, w, r)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// NameUnservedOf does that for the groups of which s serves other kinds. What else the routes of s reject gets the answer of
// the library.
func NameUnservedOf(s *genericapiserver.GenericAPIServer) {
	s.Handler.GoRestfulContainer.ServiceErrorHandler(func(e restful.ServiceError, r *restful.Request, w *restful.Response) {
		err := apierrors.NewGenericServerResponse(e.Code, "", schema.GroupResource{}, "", e.Message, 0, false)
		if named := notServed(r.Request); named != nil && e.Code == http.StatusNotFound {
			err = named
		}
		answerError(err, w, r.Request)
	})
}

func answerError(err error, w http.ResponseWriter, r *http.Request) {
	responsewriters.ErrorNegotiated(err, registry.Codecs, schema.GroupVersion{}, w, r)
}
