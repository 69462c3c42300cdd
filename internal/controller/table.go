package controller

import (
	"fmt"

	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/controller/endpoints"
	"github.com/fairlead/fairlead/internal/controller/garbage"
	"github.com/fairlead/fairlead/internal/controller/kit"
	"github.com/fairlead/fairlead/internal/controller/nodes"
	"github.com/fairlead/fairlead/internal/controller/programmed"
	"github.com/fairlead/fairlead/internal/controller/sched"
	"github.com/fairlead/fairlead/internal/controller/selection"
	"github.com/fairlead/fairlead/internal/controller/sets"
)

// The names of the controllers.
const (
	EndpointsName     = "endpoints"
	EndpointSliceName = "endpointslice"
	MirroringName     = "endpointslicemirroring"
	SchedulerName     = "scheduler"
	NodeLifecycleName = "nodelifecycle"
	NodeIPAMName      = "nodeipam"
	NamespaceName     = "namespace"
	GarbageName       = "garbage"
	ReplicaSetName    = "replicaset"
	DeploymentName    = "deployment"
	DaemonSetName     = "daemonset"
	DisruptionName    = "disruption"
	ProgrammedName    = "programmed"
	TaintEvictionName = "tainteviction"
	ChecksName        = "endpointcheck"
)

// entry is a controller in the table.
type entry struct {
	name  string
	needs needs
	build func(p *parts) (kit.Task, error)
}

// needs are the parts that a controller needs beside the kit and the options.
type needs uint8

const (
	index    needs = 1 << iota // parts.index
	store                      // parts.store
	metaOnly                   // parts.meta
)

// parts is what controllers are built from. A field is set if one of the controllers needs it.
type parts struct {
	*kit.Kit
	name    string // of the controller that is built
	options *Options
	index   *selection.Index
	store   *endpoints.SliceStore
	meta    metadata.Interface
}

// table lists all controllers, in the order in which Run starts them.
var table = []entry{
	{NamespaceName, metaOnly, func(p *parts) (kit.Task, error) { return garbage.NewNamespaces(p.Kit, p.name, p.meta) }},
	{NodeIPAMName, 0, func(p *parts) (kit.Task, error) {
		return nodes.NewIPAM(p.Kit, p.name, p.options.ipam())
	}},
	{NodeLifecycleName, index, func(p *parts) (kit.Task, error) {
		return nodes.NewLifecycle(p.Kit, p.name, nodes.LifecycleOptions{
			Index: p.index, GracePeriod: p.options.NodeGracePeriod, PeerWatch: p.options.PeerWatch, RefuteWithin: p.options.refuteWithin,
			PodGCDelay: p.options.PodGCDelay, TerminatedPodLimit: p.options.TerminatedPodLimit, Version: p.options.Version,
		})
	}},
	{SchedulerName, 0, func(p *parts) (kit.Task, error) { return sched.New(p.Kit, p.name) }},
	{EndpointsName, index, func(p *parts) (kit.Task, error) { return endpoints.NewEndpoints(p.Kit, p.name, p.index) }},
	{EndpointSliceName, index | store, func(p *parts) (kit.Task, error) {
		return endpoints.NewSlices(p.Kit, p.name, endpoints.SlicesOptions{
			Index: p.index, Store: p.store, MaxEndpoints: p.options.MaxEndpointsPerSlice,
		})
	}},
	{MirroringName, store, func(p *parts) (kit.Task, error) { return endpoints.NewMirroring(p.Kit, p.name, p.store) }},
	{GarbageName, metaOnly, func(p *parts) (kit.Task, error) { return garbage.New(p.Kit, p.name, p.meta), nil }},
	{ReplicaSetName, 0, func(p *parts) (kit.Task, error) { return sets.NewReplicaSets(p.Kit, p.name) }},
	{DeploymentName, 0, func(p *parts) (kit.Task, error) { return sets.NewDeployments(p.Kit, p.name) }},
	{DaemonSetName, 0, func(p *parts) (kit.Task, error) { return sets.NewDaemonSets(p.Kit, p.name) }},
	{DisruptionName, index, func(p *parts) (kit.Task, error) { return sets.NewDisruption(p.Kit, p.name, p.index) }},
	{TaintEvictionName, index, func(p *parts) (kit.Task, error) {
		return nodes.NewTaintEviction(p.Kit, p.name, nodes.EvictionOptions{
			Index: p.index, UnreachableToleration: p.options.UnreachableToleration,
		})
	}},
	{ProgrammedName, index, func(p *parts) (kit.Task, error) { return programmed.New(p.Kit, p.name, p.index) }},
	{ChecksName, 0, func(p *parts) (kit.Task, error) { return endpoints.NewChecks(p.Kit, p.name) }},
}

// Names lists all controllers, in the order in which Run starts them.
func Names() []string {
	out := make([]string, len(table))
	for i, e := range table {
		out[i] = e.name
	}
	return out
}

// find returns the entry of a controller; its name is valid.
func find(name string) entry {
	for _, e := range table {
		if e.name == name {
			return e
		}
	}
	panic("no controller " + name)
}

// build builds the controllers that o names, and what they need.
func build(k *kit.Kit, o *Options, config *rest.Config) ([]kit.Task, error) {
	var chosen []entry
	var all needs
	for _, name := range o.Controllers {
		e := find(name)
		chosen = append(chosen, e)
		all |= e.needs
	}
	p := &parts{Kit: k, options: o}
	var tasks []kit.Task
	var err error
	if all&metaOnly != 0 {
		if p.meta, err = metadata.NewForConfig(config); err != nil {
			return nil, fmt.Errorf("client for the controllers: %w", err)
		}
	}
	if all&index != 0 {
		if p.index, err = selection.New(k); err != nil {
			return nil, err
		}
	}
	if all&store != 0 {
		if p.store, err = endpoints.NewSliceStore(k); err != nil {
			return nil, err
		}
		tasks = append(tasks, p.store.Run)
	}
	for _, e := range chosen {
		p.name = e.name
		task, err := e.build(p)
		if err != nil {
			return nil, fmt.Errorf("controller %s: %w", e.name, err)
		}
		tasks = append(tasks, task)
	}
	return tasks, nil
}
