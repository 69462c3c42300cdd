package custom

import (
	"context"
	"encoding/json"
	"fmt"

	"k8s.io/apiextensions-apiserver/pkg/apihelpers"
	"k8s.io/apiextensions-apiserver/pkg/apis/apiextensions"
	extensionsserver "k8s.io/apiextensions-apiserver/pkg/apiserver"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/registry/generic"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/client-go/tools/cache"

	"github.com/fairlead/fairlead/internal/apiserver/backend"
)

// Define stores the definitions that the store lacks, by their names. Each is JSON of
// CustomResourceDefinition, and not validated: only definitions that come with the program may be given. The only
// server of an etcd stores them established. With several servers the library's controllers accept their names, which has them
// established after the time in which all servers learn of them.
//
// Through the API, each would be validated and then written four times, once by each of the library's controllers, and each
// write computes the owners of all fields of its schemas: two seconds of CPU for the Gateway API, at each first start.
func (r *Server) Define(ctx context.Context, back *backend.Backend, all map[string]json.RawMessage) error {
	informer := r.Informers.Apiextensions().V1().CustomResourceDefinitions()
	if !cache.WaitForCacheSync(ctx.Done(), informer.Informer().HasSynced) {
		return ctx.Err()
	}
	o, err := definitionBackEnd{back}.GetRESTOptions(apiextensions.Resource("customresourcedefinitions"), nil)
	if err != nil {
		return err
	}
	prefix := "/" + o.ResourcePrefix
	kept, end, err := generic.UndecoratedStorage(o.StorageConfig, prefix, nil,
		func() runtime.Object { return &apiextensions.CustomResourceDefinition{} },
		func() runtime.Object { return &apiextensions.CustomResourceDefinitionList{} }, nil, nil, nil)
	if err != nil {
		return fmt.Errorf("storage of definitions: %w", err)
	}
	defer end()
	for name, text := range all {
		if _, err := informer.Lister().Get(name); err == nil {
			continue
		} else if !apierrors.IsNotFound(err) {
			return err
		}
		d, err := asStored(text, r.only)
		if err != nil {
			return err
		}
		// Another server can have stored it: that one stays.
		err = kept.Create(ctx, prefix+"/"+d.Name, d, &apiextensions.CustomResourceDefinition{}, 0)
		if err != nil && !storage.IsExist(err) {
			return fmt.Errorf("cannot store definition %s: %w", d.Name, err)
		}
	}
	return nil
}

// asStored returns a definition as it is once the library's controllers have approved it, and established it if only is set. A
// missing or wrong annotation of approval is left to them.
func asStored(text []byte, only bool) (*apiextensions.CustomResourceDefinition, error) {
	d := &apiextensions.CustomResourceDefinition{}
	decoder := extensionsserver.Codecs.UniversalDecoder(apiextensions.SchemeGroupVersion)
	if err := runtime.DecodeInto(decoder, text, d); err != nil {
		return nil, fmt.Errorf("cannot read a definition: %w", err)
	}
	stored, err := apiextensions.GetCRDStorageVersion(d)
	if err != nil {
		return nil, fmt.Errorf("definition %s: %w", d.Name, err)
	}
	rest.FillObjectMetaSystemFields(d)
	d.Generation = 1
	d.Status = apiextensions.CustomResourceDefinitionStatus{StoredVersions: []string{stored}}
	accept := func(kind apiextensions.CustomResourceDefinitionConditionType, reason, message string) {
		apiextensions.SetCRDCondition(d, apiextensions.CustomResourceDefinitionCondition{
			Type: kind, Status: apiextensions.ConditionTrue, Reason: reason, Message: message,
		})
	}
	if only {
		d.Status.AcceptedNames = d.Spec.Names
		accept(apiextensions.NamesAccepted, "NoConflicts", "no conflicts found")
		accept(apiextensions.Established, "InitialNamesAccepted", "the initial names have been accepted")
	}
	if state, why := apihelpers.GetAPIApprovalState(d.Annotations); state == apihelpers.APIApproved {
		accept(apiextensions.KubernetesAPIApprovalPolicyConformant, "ApprovedAnnotation", why)
	}
	return d, nil
}
