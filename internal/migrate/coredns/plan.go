package coredns

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/fairlead/fairlead/internal/svc"
)

// Cluster is what runs on a cluster, as far as DNS is concerned. All but Services is of the namespace kube-system.
type Cluster struct {
	Deployments []*appsv1.Deployment
	ConfigMaps  map[string]*corev1.ConfigMap
	Services    []*corev1.Service
}

// Name is the name of fairlead's Deployment, which the manifest and the chart have, too.
const Name = "fairlead-dns"

// k8sApp is the label of the Service and the Pods of DNS, and its value; distributions give the Service other names.
const k8sApp = "k8s-app"

// Plan is what 'fairlead migrate plan' shows of DNS. Its JSON form is meant for programs: fields are only ever added.
type Plan struct {
	// CoreDNS describes the servers of the cluster.
	CoreDNS string `json:"coreDNS,omitempty"`
	Phase   Phase  `json:"phase"`
	// Failure is why the last step failed.
	Failure string `json:"failure,omitempty"`
	// Differs has what behaves differently, Refused what must be changed before apply works.
	Differs []string `json:"differs,omitempty"`
	Refused []string `json:"refused,omitempty"`

	service           *corev1.Service
	theirs            *appsv1.Deployment
	server            container
	port, servicePort int32
	replicas          int32
	questions         []string
	broken            error
}

// Decide makes the plan.
func Decide(c *Cluster) *Plan {
	p := &Plan{}
	p.broken = p.find(c)
	if p.broken != nil {
		p.refuse(p.broken)
		return p
	}
	p.CoreDNS = fmt.Sprintf("Deployment %s of %d Pods, %s, behind the Service %s", p.theirs.Name, p.replicas, p.server.Image, p.service.Name)
	if p.theirs.Spec.Template.Spec.HostNetwork {
		p.refuse(fmt.Errorf("the Deployment %s uses the network of its hosts, where a second server cannot have the same ports", p.theirs.Name))
	}
	if p.replicas == 0 {
		p.refuse(fmt.Errorf("the Deployment %s has no Pods: scale it up first, so that the answers can be compared", p.theirs.Name))
	}
	p.decideScaler(c)
	s, err := readCorefile(&p.theirs.Spec.Template.Spec, p.server, c.ConfigMaps)
	if err != nil {
		p.refuse(err)
		return p
	}
	p.CoreDNS += ", configured by the ConfigMap " + s.configMap
	for _, n := range s.notes {
		p.differ("%s", n)
	}
	if len(s.zones) == 0 {
		p.refuse(fmt.Errorf("ConfigMap %s: no server block has the plugin kubernetes", s.configMap))
	}
	p.questions = questions(s, c.Services)
	return p
}

// find finds the Service, CoreDNS's Deployment, and the phase.
func (p *Plan) find(c *Cluster) (err error) {
	if p.service = serviceOf(c.Services); p.service == nil {
		return errors.New("there is no Service kube-dns, or other one with the label k8s-app=kube-dns, in kube-system")
	}
	var found []*appsv1.Deployment
	var fairlead *appsv1.Deployment
	for _, d := range c.Deployments {
		switch {
		case d.Name == Name:
			fairlead = d
		case selects(p.Selected(), d):
			found = append(found, d)
		}
	}
	if len(found) != 1 {
		return fmt.Errorf("the Service %s selects the Pods of %d Deployments (%s); want one, which is CoreDNS's", p.service.Name, len(found),
			names(found))
	}
	p.theirs = found[0]
	if p.Phase, err = ParsePhase(p.theirs.Annotations[Annotation]); err != nil {
		return fmt.Errorf("on the Deployment %s: %w", p.theirs.Name, err)
	}
	p.Failure = p.theirs.Annotations[Failure]
	if fairlead != nil && (p.Phase == Before || !selects(Selector(), fairlead)) {
		return fmt.Errorf("the Deployment %s was not installed by 'fairlead migrate'; docs/kubernetes.md, CoreDNS by hand, "+
			"has the way back", Name)
	}
	if p.server, err = serverOf(p.theirs); err != nil {
		return err
	}
	if p.port, p.servicePort, err = ports(p.service, p.server.Container); err != nil {
		return err
	}
	if p.replicas = 1; p.theirs.Spec.Replicas != nil {
		p.replicas = *p.theirs.Spec.Replicas
	}
	if text, ok := p.theirs.Annotations[Replicas]; ok {
		n, err := strconv.ParseInt(text, 10, 32)
		if err != nil || n < 1 {
			return fmt.Errorf("on the Deployment %s, the annotation %s is %q; want a number from 1 on", p.theirs.Name, Replicas, text)
		}
		p.replicas = int32(n)
	}
	return nil
}

// serviceOf returns the Service that Pods ask.
func serviceOf(all []*corev1.Service) (found *corev1.Service) {
	for _, s := range all {
		if s.Namespace != svc.SystemNamespace || len(s.Spec.Selector) == 0 || s.Spec.ClusterIP == "" || s.Spec.ClusterIP == corev1.ClusterIPNone {
			continue
		}
		if s.Name == svc.DNSService {
			return s
		}
		if s.Labels[k8sApp] == svc.DNSService && (found == nil || s.Name < found.Name) {
			found = s
		}
	}
	return found
}

// Selected is what the Service selects before and after a migration.
func (p *Plan) Selected() map[string]string {
	out := maps.Clone(p.service.Spec.Selector)
	delete(out, PodLabel)
	return out
}

// selects reports whether a selector selects the Pods of a Deployment.
func selects(selector map[string]string, d *appsv1.Deployment) bool {
	return labels.SelectorFromSet(selector).Matches(labels.Set(d.Spec.Template.Labels))
}

func names(all []*appsv1.Deployment) string {
	var out []string
	for _, d := range all {
		out = append(out, d.Name)
	}
	return strings.Join(out, ", ")
}

// decideScaler refuses where another program scales CoreDNS, and would start it again (cluster-proportional-autoscaler).
func (p *Plan) decideScaler(c *Cluster) {
	target := "--target=deployment/" + strings.ToLower(p.theirs.Name)
	for _, d := range c.Deployments {
		if d.Spec.Replicas != nil && *d.Spec.Replicas == 0 {
			continue
		}
		for i := range d.Spec.Template.Spec.Containers {
			words := slices.Concat(d.Spec.Template.Spec.Containers[i].Command, d.Spec.Template.Spec.Containers[i].Args)
			if slices.ContainsFunc(words, func(w string) bool { return strings.ToLower(w) == target }) {
				p.refuse(fmt.Errorf("the Deployment %s scales %s, and would start it again: scale %s to 0 first", d.Name, p.theirs.Name, d.Name))
			}
		}
	}
}

func (p *Plan) refuse(err error) { p.Refused = append(p.Refused, err.Error()) }

func (p *Plan) differ(format string, args ...any) {
	p.Differs = append(p.Differs, fmt.Sprintf(format, args...))
}

// Broken is an error if the objects of CoreDNS were not found or have a mistake. No command goes on then.
func (p *Plan) Broken() error { return p.broken }

// Theirs are CoreDNS's Deployment, its number of Pods, and the Service.
func (p *Plan) Theirs() (d *appsv1.Deployment, replicas int32, s *corev1.Service) {
	return p.theirs, p.replicas, p.service
}

// Ports are where the Pods and the Service answer.
func (p *Plan) Ports() (ofPods, ofService int32) { return p.port, p.servicePort }

// Questions are those by which servers are compared.
func (p *Plan) Questions() []string { return slices.Clone(p.questions) }

// Enter returns CoreDNS's Deployment as it is in a phase.
func (p *Plan) Enter(d *appsv1.Deployment, to Phase) *appsv1.Deployment {
	out := d.DeepCopy()
	out.Annotations = maps.Clone(out.Annotations)
	if out.Annotations == nil {
		out.Annotations = map[string]string{}
	}
	delete(out.Annotations, Failure)
	replicas := p.replicas
	if to == After {
		replicas = 0
	}
	out.Spec.Replicas = &replicas
	if to == Before {
		delete(out.Annotations, Annotation)
		delete(out.Annotations, Replicas)
		return out
	}
	out.Annotations[Annotation], out.Annotations[Replicas] = string(to), strconv.Itoa(int(p.replicas))
	return out
}
