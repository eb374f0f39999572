"""Machines that nobody here has, by arithmetic: measured kernels carried over to them under assumptions with names.

carry        times of kernels on one GPU to times on another, and over several
loop         a closed loop of requests on split and on unified engines
rtx_pro_6000 the box of eight RTX PRO 6000, and the table of docs/case-rtx-pro-6000.md
"""
