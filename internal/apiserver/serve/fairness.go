package serve

import (
	"context"
	"fmt"
	"slices"
	"time"

	flowcontrolv1 "k8s.io/api/flowcontrol/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/apis/flowcontrol/bootstrap"
	utilflowcontrol "k8s.io/apiserver/pkg/util/flowcontrol"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"

	"github.com/fairlead/fairlead/internal/svc"
)

// NewFairness returns the library's API Priority and Fairness for the given number
// of concurrent requests: no level can starve another, the users of a level share
// it fairly, and requests that wait too long or in too long a queue get 429. A mere
// limit of in-flight requests would let one client take all seats.
//
// The levels are the defaults of Kubernetes and the levels of fairlead's own parts.
// They are part of the program and not objects of the API.
func NewFairness(shared informers.SharedInformerFactory, client kubernetes.Interface, seats int) utilflowcontrol.Interface {
	schemas, levels := &flowcontrolv1.FlowSchemaList{}, &flowcontrolv1.PriorityLevelConfigurationList{}
	for _, l := range slices.Concat(bootstrap.MandatoryPriorityLevelConfigurations, bootstrap.SuggestedPriorityLevelConfigurations) {
		levels.Items = append(levels.Items, *l)
	}
	for _, s := range slices.Concat(bootstrap.MandatoryFlowSchemas, bootstrap.SuggestedFlowSchemas, ownFlowSchemas()) {
		s = s.DeepCopy()
		// The controller would write this condition to the API.
		s.Status.Conditions = []flowcontrolv1.FlowSchemaCondition{{
			Type: flowcontrolv1.FlowSchemaConditionDangling, Status: flowcontrolv1.ConditionFalse, Reason: "Found",
			Message: fmt.Sprintf("This FlowSchema references the PriorityLevelConfiguration object named %q and it exists",
				s.Spec.PriorityLevelConfiguration.Name),
		}}
		schemas.Items = append(schemas.Items, *s)
	}
	// The controller takes its objects from these informers of the factory.
	shared.InformerFor(&flowcontrolv1.FlowSchema{}, fixedInformer(&flowcontrolv1.FlowSchema{}, schemas))
	shared.InformerFor(&flowcontrolv1.PriorityLevelConfiguration{}, fixedInformer(&flowcontrolv1.PriorityLevelConfiguration{}, levels))
	return utilflowcontrol.New(shared, client.FlowcontrolV1(), seats)
}

// ownFlowSchemas gives fairlead's controllers the levels of Kubernetes' controllers,
// and their leader election a level apart from their work.
func ownFlowSchemas() []*flowcontrolv1.FlowSchema {
	election := bootstrap.SuggestedFlowSchemaSystemLeaderElection.DeepCopy()
	work := bootstrap.SuggestedFlowSchemaKubeControllerManager.DeepCopy()
	election.Name, work.Name = "fairlead-leader-election", svc.Controllers
	for _, s := range []*flowcontrolv1.FlowSchema{election, work} {
		for i := range s.Spec.Rules {
			s.Spec.Rules[i].Subjects = []flowcontrolv1.Subject{{
				Kind: flowcontrolv1.SubjectKindGroup, Group: &flowcontrolv1.GroupSubject{Name: svc.ControllersGroup},
			}}
		}
	}
	return []*flowcontrolv1.FlowSchema{election, work}
}

// fixedInformer returns a constructor of an informer of objects that never change.
func fixedInformer(kind, list runtime.Object) func(kubernetes.Interface, time.Duration) cache.SharedIndexInformer {
	return func(kubernetes.Interface, time.Duration) cache.SharedIndexInformer {
		return cache.NewSharedIndexInformer(fixedList{list}, kind, 0, cache.Indexers{})
	}
}

// fixedList is a ListerWatcher of objects that never change.
type fixedList struct{ runtime.Object }

// List returns a copy of the list.
func (f fixedList) List(metav1.ListOptions) (runtime.Object, error) { return f.DeepCopyObject(), nil }

// Watch returns a watch without events.
func (f fixedList) Watch(metav1.ListOptions) (watch.Interface, error) {
	return watch.NewProxyWatcher(make(chan watch.Event)), nil
}

// ListWithContext is List.
func (f fixedList) ListWithContext(_ context.Context, o metav1.ListOptions) (runtime.Object, error) {
	return f.List(o)
}

// WatchWithContext is Watch.
func (f fixedList) WatchWithContext(_ context.Context, o metav1.ListOptions) (watch.Interface, error) {
	return f.Watch(o)
}

// IsWatchListSemanticsUnSupported makes the informer list first.
func (f fixedList) IsWatchListSemanticsUnSupported() bool { return true }
