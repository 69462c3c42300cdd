package policy

import (
	"net/url"
	"strings"
)

// NginxAuth is what ingress-nginx does otherwise: each 2xx lets a request pass, the client gets no other status than 401, 403 and 500,
// and the server gets the address of the request in fields.
type NginxAuth struct {
	// SignIn is where a browser is sent instead of 401, "" for 401, with its address in the parameter RedirectParam unless the query
	// of SignIn has that. It may have the variables of Fill.
	SignIn, RedirectParam string
	// Redirect is the value of X-Auth-Request-Redirect, with variables.
	Redirect string
	// AlwaysCookie gives the client the cookies of the answer with each status, and not only with successful ones and redirects.
	AlwaysCookie bool
}

// Variables are the variables of nginx in the texts of a NginxAuth. None is the beginning of another one.
//
//nolint:gochecknoglobals // constant
var Variables = []string{
	"$scheme", "$pass_access_scheme", "$host", "$http_host", "$best_http_host", "$request_uri", "$escaped_request_uri",
}

// Fill replaces the variables of a text by what a request has.
func Fill(text, scheme, host, uri string) string {
	if !strings.Contains(text, "$") {
		return text
	}
	name := host
	if u, err := url.Parse("//" + host); err == nil {
		name = u.Hostname()
	}
	return strings.NewReplacer(
		"$scheme", scheme, "$pass_access_scheme", scheme, "$host", name, "$http_host", host, "$best_http_host", host,
		"$request_uri", uri, "$escaped_request_uri", url.QueryEscape(uri),
	).Replace(text)
}

// Location returns where a browser signs in.
func (n *NginxAuth) Location(scheme, host, uri string) string {
	to := Fill(n.SignIn, scheme, host, uri)
	if u, err := url.Parse(n.SignIn); err != nil || u.Query().Has(n.RedirectParam) {
		return to
	}
	with := "?"
	if strings.Contains(to, "?") {
		with = "&"
	}
	return to + with + n.RedirectParam + "=" + url.QueryEscape(scheme+"://"+host+uri)
}
