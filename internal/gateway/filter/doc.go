// Package filter is what rules of routes do to requests and answers on their way. It is pure.
package filter
